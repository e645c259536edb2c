"""`eyas draft`: heads of other projects in and out, and smaller heads.

The work itself is left to the engine's `draft`, measuring to `evaluation`.
"""

import argparse
from pathlib import Path
from typing import TextIO

from app.cli_eval import answer_all, choose_trees, load_pair, open_model
from app.evaluation import Evaluation, evaluate
from app.prompt_file import read_chats
from engine import resolve_model
from engine.draft.exchange import export_draft, import_draft, quantize_draft


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Run one of the commands."""
    model = resolve_model(options.model)
    if options.action == "import":
        kind = import_draft(options.source, model, options.out, options.tap_convention)
        out.write(f"{options.out}: {kind} head of {options.source}\n")
    elif options.action == "export":
        export_draft(options.source, model, options.out, options.format, options.num_drafts)
        out.write(f"{options.out}: {options.format} checkpoint of {options.source}\n")
    else:
        quantize(options, model, out)
    return 0


def quantize(options: argparse.Namespace, model: Path, out: TextIO) -> None:
    """Write the quantized copy and how it differs: in its weights, its size, and the drafts accepted."""
    chats = read_chats(options.prompts, options.limit)
    errors = quantize_draft(
        options.source, model, options.out, options.precision, options.group_size, options.head
    )
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (options.source, options.out)]
    out.write(f"{options.out}: {sizes[1] / 1e6:.1f} MB, from {sizes[0] / 1e6:.1f} MB\n")
    out.writelines(f"{name}: relative error {error:.4f}\n" for name, error in errors.items())
    trees = choose_trees(options.trees, options.source)
    facts, answers = answer_all(options, chats, open_model(options, str(options.source)))
    columns = []
    for draft in (options.source, options.out):
        pair = load_pair(facts, model, draft, answers)
        columns.append([evaluate(part, pair, options.tree, trees)[0] for part in answers])
    out.write(change_table(*columns))


def change_table(before: list[Evaluation], after: list[Evaluation]) -> str:
    """Return tokens per call of two drafts on the same answers, by temperature and tree."""
    lines = [f"{'temperature':>11}  {'tree':<10} {'before':>7} {'after':>7} {'change':>7}"]
    for left, right in zip(before, after, strict=True):
        for one, other in zip(left.trees, right.trees, strict=True):
            change = other.tokens_per_call - one.tokens_per_call
            lines.append(
                f"{left.temperature:>11g}  {one.tree:<10} {one.tokens_per_call:>7.3f} "
                f"{other.tokens_per_call:>7.3f} {change:>+7.3f}"
            )
    return "\n".join([*lines, ""])
