"""`eyas eval`: how much of a draft a model accepts on a file of prompts.

The measuring is left to `evaluation`.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TextIO

from app.evaluation import Evaluation, evaluate
from app.local_model import LocalModel, check_length
from app.machine import describe_machine
from app.prompt_file import read_prompts
from engine import EngineConfig, EngineFacts


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Answer the prompts and write what was accepted."""
    chats = read_prompts(options.prompts, options.limit)
    sizes = EngineConfig(
        Path(options.model), dtype=options.dtype, max_num_seqs=options.batch, max_num_waiting=len(chats)
    )
    model = LocalModel.open(sizes, options.model, options.draft)
    prompts = [model.encode_chat(chat) for chat in chats]
    engine = model.engine()
    check_length(max(map(len, prompts)), options.max_tokens, engine.facts.max_model_len)
    evaluation = evaluate(engine, prompts, options.tree, options.max_tokens)
    write = _json_report if options.json else text_report
    out.write(write(engine.facts, options.tree, evaluation))
    return 0


def text_report(facts: EngineFacts, tree: str, evaluation: Evaluation) -> str:
    """Return the report for a reader."""
    unrepeated = evaluation.tokens_per_call_unrepeated
    lines = [f"{name}: {value}" for name, value in describe_machine(facts).items()]
    lines += [
        f"tree: {tree}, prompts: {evaluation.num_prompts}, tokens: {evaluation.num_tokens}",
        f"tokens per call: {evaluation.tokens_per_call:.3f}",
        f"without the {evaluation.num_repeating} answers that repeat themselves: "
        + ("none left" if unrepeated is None else f"{unrepeated:.3f}"),
        "",
        "depth  accepted  reached  rate",
    ]
    for row in evaluation.acceptance_by_depth:
        lines.append(f"{row.depth:>5} {row.accepted:>9} {row.reached:>8}  {row.rate:.3f}")
    return "\n".join([*lines, ""])


def _json_report(facts: EngineFacts, tree: str, evaluation: Evaluation) -> str:
    report = {"environment": describe_machine(facts), "tree": tree} | dataclasses.asdict(evaluation)
    return json.dumps(report, indent=2) + "\n"
