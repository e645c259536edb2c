"""`eyas bench`: speculation against plain decoding on this machine, as a table or as JSON.

The measuring is left to `bench`.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TextIO

import torch

from app.bench import PLAIN, BenchPlan, Cell, measure
from app.bench_prompts import bench_prompts
from app.local_model import LocalModel, check_length
from app.machine import describe_machine
from app.offline import frozen_heap
from app.prompt_file import read_chats
from engine import MAX_GAP, ConfigError, EngineConfig, EngineFacts, NearTies, StepError

AUTO_TREE = "auto"
MAX_TREE_NODES = 64
MAX_JUDGED = 256  # each costs a pass of the target on the CPU
BASELINE = "plain decoding by the same engine in the same run, arms alternating ABBA"

_COLUMNS = (
    f"{'batch':>5} {'context':>7} {'arm':<10} {'tokens/s':>9} {'per call':>8} {'idle':>6} "
    f"{'speed-up':>8}  95% interval"
)


class Judge(Protocol):
    """Says how near two next tokens tie; `engine.NearTies` is one."""

    def gap(self, tokens: tuple[int, ...], left: int, right: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """How the speculative answers compare with plain decoding's: `gaps` has the float32 logit gap of up to
    256 of the divergences, evenly chosen.
    """

    rows: int
    identical_rows: int
    gaps: tuple[float, ...]
    max_gap: float

    def check(self) -> None:
        """Raise `StepError` where an answer left plain decoding's at more than a near-tie."""
        faults = [gap for gap in self.gaps if gap > self.max_gap]
        if faults:
            raise StepError(
                f"{len(faults)} of {self.rows} answers differ from plain decoding's where the logits are "
                f"{max(faults):.3f} apart, {self.max_gap} allowed: speculation changed the output"
            )


def judge(cells: Sequence[Cell], facts: EngineFacts, open_judge: Callable[[], Judge]) -> Identity:
    """Compare the speculative cells with plain decoding; the judge is opened only where answers differ."""
    speculative = [cell for cell in cells if cell.arm != PLAIN]
    found = [divergence for cell in speculative for divergence in cell.divergences]
    gaps: tuple[float, ...] = ()
    if found:
        judge = open_judge()
        chosen = found[:: -(-len(found) // MAX_JUDGED)]
        gaps = tuple(judge.gap(d.tokens, d.plain, d.speculative) for d in chosen)
    rows = sum(cell.rows for cell in speculative)
    return Identity(rows, rows - len(found), gaps, MAX_GAP[facts.dtype])


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Measure every batch size and write the report; an answer that differs by more than a near-tie is an
    error.
    """
    if PLAIN in options.tree:
        raise ConfigError("--tree off is the baseline: name trees, or auto")
    if options.context is not None and (options.prompts is not None or len(options.context) > 1):
        raise ConfigError("--context is one number, and not for --prompts, whose texts are taken as they are")
    chats = None if options.prompts is None else read_chats(options.prompts)
    model = LocalModel.open(_sizes(options), options.model, options.draft)
    if chats is None:
        prompts = bench_prompts(
            model.tokenizer, model.template, options.context[0] if options.context else None
        )
    else:
        prompts = tuple(model.encode_chat(chat.first_turn) for chat in chats)
    engine = model.engine()
    facts = engine.facts
    check_length(max(map(len, prompts)), options.max_tokens, facts.max_model_len)
    if facts.draft_digest is None:
        raise ConfigError("no draft is loaded: name its folder with --draft, or use a model that ships one")
    for tree in options.tree:
        if tree != AUTO_TREE:
            engine.capture(tree, max(options.batch))
    plan = BenchPlan(prompts, options.batch, options.max_tokens, options.rounds, options.tree)
    with frozen_heap():
        cells = measure(engine, plan, time.perf_counter)
    identity = judge(cells, facts, lambda: NearTies(model.config.model))
    report = (
        _json_report(plan, facts, cells, identity) if options.json else table(plan, facts, cells, identity)
    )
    out.write(report)
    identity.check()
    return 0


def _sizes(options: argparse.Namespace) -> EngineConfig:
    """Return an engine that holds the largest batch, with a budget for the largest tree in every row."""
    max_batch = max(options.batch)
    sizes = EngineConfig(
        Path(options.model),
        dtype=options.dtype,
        device=options.device,
        attention_backend=options.attention_backend,
        block_size=options.block_size,
        max_num_seqs=max_batch,
        enable_prefix_cache=False,  # the second arm of a round would find the first one's prompts
    )
    is_cuda = options.device != "cpu" and torch.cuda.is_available()
    usual = sizes.device_sizes(is_cuda).max_batched_tokens
    return replace(sizes, max_batched_tokens=max(usual, max_batch * (MAX_TREE_NODES + 1)))


def table(plan: BenchPlan, facts: EngineFacts, cells: Sequence[Cell], identity: Identity) -> str:
    """Return the report for a reader."""
    lines = [f"{name}: {value}" for name, value in describe_machine(facts).items()]
    lines += [f"baseline: {BASELINE}", f"rounds: {plan.rounds}, tokens per answer: {plan.max_tokens}", ""]
    lines.append(_COLUMNS)
    for cell in cells:
        interval = "" if cell.arm == PLAIN else f"[{cell.ci_low:.2f}, {cell.ci_high:.2f}]"
        lines.append(
            f"{cell.batch:>5} {cell.context:>7} {cell.arm:<10} {cell.tokens_per_second:>9.1f} "
            f"{cell.tokens_per_call:>8.2f} {cell.idle_share:>6.1%} {cell.speedup:>8.2f}  {interval}".rstrip()
        )
    lines += ["", f"answers identical to plain decoding: {identity.identical_rows} of {identity.rows}"]
    if identity.gaps:
        lines.append(
            f"first divergences: float32 logit gap up to {max(identity.gaps):.3f} in {len(identity.gaps)} of "
            f"{identity.rows - identity.identical_rows}, {identity.max_gap} allowed"
        )
    return "\n".join([*lines, ""])


def _json_report(plan: BenchPlan, facts: EngineFacts, cells: Sequence[Cell], identity: Identity) -> str:
    report = {
        "environment": describe_machine(facts),
        "baseline": BASELINE,
        "rounds": plan.rounds,
        "max_tokens": plan.max_tokens,
        "cells": [_cell_report(cell) for cell in cells],
        "identity": {
            "rows": identity.rows,
            "identical_rows": identity.identical_rows,
            "share": identity.identical_rows / identity.rows,
            "gaps": identity.gaps,
            "max_gap": identity.max_gap,
        },
    }
    return json.dumps(report, indent=2) + "\n"


def _cell_report(cell: Cell) -> dict[str, object]:
    values = dataclasses.asdict(cell)
    del values["divergences"]  # whole texts: the report gives their gaps
    return {**values, "identical_rows": cell.identical_rows}
