"""Measures what fewer bits gain in time and cost in accepted drafts, against the same engine without them.

Run: python benchmarks/few_bits.py --model FOLDER --draft FOLDER --prompts PROMPTS.jsonl --json FILE, or with
--synthetic llama-3.1-8b for the time alone.
"""

import argparse
import dataclasses
import gc
import json
import sys
import time
from pathlib import Path

import torch

# Run by its path, Python looks for modules beside this file only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from app.bench import PLAIN, BenchPlan, measure
from app.bench_synthetic import SyntheticBench
from app.cli_bench_synthetic import parse_cells, plan_of
from app.local_model import LocalModel
from app.prompt_file import read_chats
from engine import EngineConfig, PrecisionConfig, SpeculationConfig

PRECISIONS = {
    "model": PrecisionConfig(),
    "draft int4-ffn": PrecisionConfig(draft="int4-ffn"),
    "cache fp8": PrecisionConfig(cache="fp8"),
    "target fp8": PrecisionConfig(target="fp8"),
}
Rows = list[dict[str, object]]


def measure_model(options: argparse.Namespace, name: str) -> Rows:
    """Answer prompts with a real model and its draft."""
    batch = max(options.batch)
    sizes = EngineConfig(
        options.model,
        dtype="bfloat16",
        device="cuda",
        max_num_seqs=batch,
        enable_prefix_cache=False,
        speculation=SpeculationConfig(mode="off"),  # requests name their trees
        precision=PRECISIONS[name],
    )
    model = LocalModel.open(sizes, str(options.model), str(options.draft))
    prompts = tuple(model.encode_chat(chat.first_turn) for chat in read_chats(options.prompts))
    engine = model.engine()
    for arm in (PLAIN, *options.trees):
        engine.capture(arm, batch)
    plan = BenchPlan(prompts, tuple(options.batch), options.max_tokens, options.rounds, tuple(options.trees))
    rows: Rows = []
    for cell in measure(engine, plan, time.perf_counter):
        found = {**dataclasses.asdict(cell), "identical_rows": cell.identical_rows, "precision": name}
        del found["divergences"]
        rows.append(found)
        print(
            f"{name:<15} {cell.batch:>4} {cell.arm:<8} {cell.tokens_per_second:>9.0f} tokens/s "
            f"{cell.tokens_per_call:.3f} per call  {cell.speedup:.2f} of plain",
            flush=True,
        )
    return rows


def measure_synthetic(options: argparse.Namespace, name: str) -> Rows:
    """Time steps over random weights of a published shape: no word about acceptance."""
    cells = parse_cells(options.cells, (PLAIN, *options.trees), (0.0,))
    fixed = argparse.Namespace(
        synthetic=options.synthetic,
        profile=None,
        device="cuda",
        dtype="bfloat16",
        block_size=64,
        attention_backend="auto",
        tokens_per_call=2.78,
        trees=((8, 4),),
        rounds=options.rounds,
        seconds=options.seconds,
        trace=False,
    )
    plan, _ = plan_of(fixed, cells)
    bench = SyntheticBench(
        dataclasses.replace(plan, sizes=dataclasses.replace(plan.sizes, precision=PRECISIONS[name]))
    )
    rows: Rows = []
    for result in bench.run():
        for arm in result.arms:
            rows.append(
                {
                    "precision": name,
                    "context": result.cell.context,
                    "batch": result.cell.batch,
                    "arm": arm.arm,
                    "rounds": arm.rounds,
                    "ms_per_step": arm.ms_per_step,
                    "ms_per_token": arm.ms_per_token,
                }
            )
            print(
                f"{name:<15} {result.cell.context:>5} x {result.cell.batch:<3} {arm.arm:<8} "
                f"{arm.ms_per_step:.3f} ms a step, {arm.ms_per_token:.3f} a token",
                flush=True,
            )
        if result.hole is not None:
            print(f"{name:<15} {result.cell.context:>5} x {result.cell.batch:<3} hole: {result.hole}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--synthetic", help="a published shape; instead of --model")
    parser.add_argument("--cells", default="1k:1,1k:64", help="CONTEXT:BATCH,... of the synthetic model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--trees", nargs="+", default=["chain-3"])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for the synthetic cells of one precision"
    )
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: Rows = []
    for name in options.precisions:
        rows += measure_synthetic(options, name) if options.synthetic else measure_model(options, name)
        gc.collect()
        torch.cuda.empty_cache()
    if options.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
