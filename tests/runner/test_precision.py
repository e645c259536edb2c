"""The precision of an engine: layers in few bits where they were asked for, and the output law with them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.fp8_linear import Fp8Linear
from engine.layers.int4_linear import Int4Linear
from engine.layers.linear import PackedLinear
from engine.precision import PrecisionConfig
from engine.request import Request, SamplingParams
from engine.runner.synthetic import eagle3_config, random_head, random_target
from engine.runner.worker import Origin, prepare_networks, wire_worker
from engine.synthetic import SyntheticEngine, SyntheticWeights
from engine.tree.library import DEFAULT_PROFILE, TreeLibrary
from tests.synthetic_cases import TINY, engine_config

MODEL = replace(
    TINY, vocab_size=256, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16
)
CPU = torch.device("cpu")


def make_networks():
    draft = eagle3_config(MODEL)
    target = random_target(MODEL, draft.taps, 256, torch.bfloat16, CPU)
    return target, random_head(draft, target, 256)


def kinds(network):
    """Return the types of the linear layers of a network by name."""
    found = {}
    for name, module in network.layers.named_modules():
        if isinstance(module, nn.Linear | Fp8Linear | Int4Linear | PackedLinear):
            found.setdefault(name.split(".")[-1], set()).add(type(module))
    return found


@pytest.mark.parametrize("target_bits", ["model", "fp8"])
@pytest.mark.parametrize("draft_bits", ["model", "int4-ffn"])
def test_only_the_layers_that_were_asked_for_lose_bits(target_bits, draft_bits):
    target, head = make_networks()
    plain = {kind for layers in map(kinds, make_networks()) for found in layers.values() for kind in found}
    assert plain == {nn.Linear}
    prepare_networks(PrecisionConfig(target=target_bits, draft=draft_bits), target, head)
    few = {"target": {Fp8Linear}, "draft": {Int4Linear}}
    for name, found in kinds(target).items():
        assert (found == few["target"]) == (target_bits == "fp8"), name
    for name, found in kinds(head).items():
        is_mlp = name in ("gate_up_proj", "down_proj")
        assert (found == few["draft"]) == (is_mlp and draft_bits == "int4-ffn"), name


@pytest.mark.parametrize("precision", [PrecisionConfig(target="fp8"), PrecisionConfig(draft="int4-ffn")])
def test_an_engine_in_few_bits_accepts_what_the_profile_says(precision):
    config = replace(engine_config(dtype="bfloat16", max_model_len=192), precision=precision)
    weights = SyntheticWeights.create("tiny", MODEL, config)
    bench = SyntheticEngine(config, weights, DEFAULT_PROFILE, [(8, 4)])
    for row in range(4):
        params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, speculation="tree-8")
        bench.engine.add(Request(f"row-{row}", (3, 1 + row, 4), params))
    deltas = []
    while bench.engine.has_work:
        deltas += bench.engine.step()
    assert {delta.message for delta in deltas} == {None}
    assert sum(len(delta.token_ids) for delta in deltas) == 4 * 48
    assert bench.engine.stats().num_accepted > 0


def test_a_cache_in_eight_bits_is_refused_where_no_kernel_reads_it():
    config = EngineConfig(
        "", num_blocks=8, max_num_seqs=1, num_threads=1, precision=PrecisionConfig(cache="fp8")
    )
    target, _ = make_networks()
    with pytest.raises(ConfigError, match=r"precision\.cache fp8 needs attention_backend triton"):
        wire_worker(config, target, None, TreeLibrary((), 0), Origin("tiny", "", "", None))


@pytest.mark.parametrize("name", ["target", "draft", "cache"])
def test_an_unknown_precision_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"precision\.{name} must be one of model, .*found 'int3'"):
        PrecisionConfig(**{name: "int3"})
