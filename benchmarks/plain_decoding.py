"""How good plain decoding is: one engine step against its own matrix products, and against transformers'
generate.

Everything alternates in one process at one thread, in the environment of a serving core; medians of rounds.
Run: python benchmarks/plain_decoding.py DTYPE
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from engine import Engine, EngineConfig, Request, SamplingParams, resolve_model
from engine.environment import enter_core_environment
from engine.model.config import ModelConfig
from engine.runner.calibrate import DTYPES
from engine.runner.worker import load_target

PROMPT_LEN, NUM_TOKENS = 64, 48


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def time_products(folder: Path, dtype: torch.dtype) -> Callable[[], None]:
    """Return work that multiplies one token with every weight of a decode step, and does nothing else."""
    target = load_target(folder, ModelConfig.load(folder), (), 16, dtype, torch.device("cpu"))
    weights = [w for n, w in target.named_parameters() if n.endswith("proj.weight")] + [target.head_weight]
    inputs = {w.shape[1]: torch.randn(1, w.shape[1], dtype=dtype) for w in weights}

    @torch.inference_mode()
    def work() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    return work


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder, dtype = resolve_model("smollm2"), DTYPES[options.dtype]
    engine = Engine.load(EngineConfig(folder, dtype=options.dtype, num_threads=1, enable_prefix_cache=False))
    products = time_products(folder, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    prompt = tuple(range(1000, 1000 + PROMPT_LEN))
    inputs = torch.tensor([prompt])

    def ours(num_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        engine.add(Request("r", prompt, params))
        while engine.has_work:
            engine.step()

    def generate(num_tokens: int) -> None:
        theirs.generate(inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)

    rounds: dict[str, list[float]] = {"engine": [], "transformers": [], "products": []}
    for _ in range(options.rounds):
        # The difference of two lengths is decoding alone: prefill and start-up cancel out.
        for name, work in (("engine", ours), ("transformers", generate)):
            num_steps = NUM_TOKENS - 8
            rounds[name].append(
                (seconds(lambda w=work: w(NUM_TOKENS)) - seconds(lambda w=work: w(8))) / num_steps
            )
        rounds["products"].append(statistics.median(seconds(products) for _ in range(10)))
    medians = {name: statistics.median(times) * 1e3 for name, times in rounds.items()}
    print(
        json.dumps(
            {
                "dtype": options.dtype,
                "ms_per_token": {name: round(value, 2) for name, value in medians.items()},
                "engine_over_products": round(medians["engine"] / medians["products"], 3),
                "engine_over_transformers": round(medians["engine"] / medians["transformers"], 3),
            }
        )
    )


if __name__ == "__main__":
    enter_core_environment()
    main()
