"""The strict loader: missing, surplus, misshapen and overflowing tensors, and conversion of dtypes."""

import itertools

import pytest
import torch
from torch import nn

from engine.errors import ModelLoadError
from engine.weights.loader import load_into
from engine.weights.mapping import Placement, WeightMapping, identity_mapping
from engine.weights.safetensors import SafetensorsFile, write_safetensors

MAPPING = WeightMapping(
    {"q": Placement("qk.weight", 0, 4), "k": Placement("qk.weight", 4, 2), "n": Placement("norm.weight")},
    ignored=("rotary_emb.inv_freq",),
)
SHAPES = {"qk.weight": (6, 3), "norm.weight": (5,)}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def stored_tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(11)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in (("q", (4, 3)), ("k", (2, 3)), ("n", (5,)))
    }


@pytest.fixture
def load(tmp_path, named_module):
    def load_tensors(tensors, dtype=torch.float32, mapping=MAPPING):
        write_safetensors(tmp_path / "m.safetensors", tensors)
        module = named_module(SHAPES, dtype)
        load_into(module, SafetensorsFile(tmp_path / "m.safetensors"), mapping)
        return module.state_dict()

    return load_tensors


@pytest.mark.parametrize(("stored", "wanted"), [*itertools.product(FLOATS, FLOATS)])
def test_every_float_dtype_loads_into_every_other(load, stored, wanted):
    tensors = stored_tensors(stored)
    state = load(tensors, wanted)
    assert {tensor.dtype for tensor in state.values()} == {wanted}
    assert torch.equal(state["qk.weight"], torch.cat([tensors["q"], tensors["k"]]).to(wanted))
    assert torch.equal(state["norm.weight"], tensors["n"].to(wanted))


def test_a_missing_tensor_is_named(load):
    with pytest.raises(ModelLoadError, match="lack 2 tensors: k, n"):
        load({"q": stored_tensors()["q"]})


def test_a_surplus_tensor_is_named(load):
    with pytest.raises(ModelLoadError, match=r"1 unknown tensors: layers\.9\.extra"):
        load(stored_tensors() | {"layers.9.extra": torch.zeros(1)})


def test_an_ignored_tensor_is_left_unread(load):
    tensors = stored_tensors()
    state = load(tensors | {"layers.0.rotary_emb.inv_freq": torch.zeros(8)})
    assert torch.equal(state["norm.weight"], tensors["n"])


@pytest.mark.parametrize("shape", [(5, 3), (3, 3), (4, 2), (12,), (3, 4), (1, 4, 3)])
def test_a_misshapen_tensor_is_named_before_anything_is_copied(tmp_path, named_module, shape):
    write_safetensors(tmp_path / "m.safetensors", stored_tensors() | {"q": torch.ones(shape)})
    module = named_module(SHAPES)
    with pytest.raises(ModelLoadError, match=r"tensor q must have shape \[4, 3\]"):
        load_into(module, SafetensorsFile(tmp_path / "m.safetensors"), MAPPING)
    assert all(not tensor.any() for tensor in module.state_dict().values())


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.float64])
def test_a_quantized_or_foreign_dtype_is_refused(load, dtype):
    with pytest.raises(ModelLoadError, match=r"tensor n must be stored as float32.*found torch\."):
        load(stored_tensors() | {"n": torch.zeros(5).to(dtype)})


def test_a_value_beyond_float16_is_refused_in_float16_only(load):
    tensors = stored_tensors(torch.bfloat16)
    tensors["n"][3] = 70000.0
    assert load(tensors, torch.bfloat16)["norm.weight"][3] == tensors["n"][3]
    with pytest.raises(ModelLoadError, match="tensor n overflows float16"):
        load(tensors, torch.float16)


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("ids", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("scale", torch.zeros(()))
        self.register_buffer("table", torch.zeros(3), persistent=False)


def test_persistent_buffers_are_filled_and_others_left(tmp_path):
    tensors = {"ids": torch.tensor([3, 1, 4, 1]), "scale": torch.tensor(0.5)}
    write_safetensors(tmp_path / "m.safetensors", tensors)
    module = WithBuffers()
    load_into(module, SafetensorsFile(tmp_path / "m.safetensors"), identity_mapping(tensors))
    assert torch.equal(module.ids, tensors["ids"])
    assert module.scale == 0.5
    assert torch.equal(module.table, torch.zeros(3))


def test_an_integer_buffer_takes_its_own_dtype_only(tmp_path):
    tensors = {"ids": torch.zeros(4, dtype=torch.int32), "scale": torch.tensor(0.5)}
    write_safetensors(tmp_path / "m.safetensors", tensors)
    with pytest.raises(ModelLoadError, match=r"tensor ids must be stored as torch\.int64"):
        load_into(WithBuffers(), SafetensorsFile(tmp_path / "m.safetensors"), identity_mapping(tensors))


@pytest.mark.parametrize(
    "placements",
    [
        {"q": Placement("qk.weight", 0, 4), "n": Placement("norm.weight")},
        {"q": Placement("qk.weight", 0, 4), "k": Placement("qk.weight", 3, 3), "n": Placement("norm.weight")},
        {"q": Placement("qk.weight"), "n": Placement("gone.weight")},
    ],
)
def test_a_mapping_that_leaves_rows_unfilled_is_our_defect(load, placements):
    stored = {name: tensor for name, tensor in stored_tensors().items() if name in placements}
    with pytest.raises(AssertionError, match=r"rows|no parameter"):
        load(stored, mapping=WeightMapping(placements))
