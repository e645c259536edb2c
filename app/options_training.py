"""The arguments of the commands that make and measure a draft.

What they do is left to their `cli_` modules.
"""

import argparse
from pathlib import Path

from app.options import (
    DTYPES,
    Commands,
    add_model,
    names,
    natural,
    natural_list,
    non_negative_floats,
    positive,
)
from app.options_registry import add_registry


def add_synth(commands: Commands) -> None:
    """Add `eyas synth`."""
    synth = commands.add_parser("synth", help="let a model write the training data of its draft")
    synth.set_defaults(module="app.cli_synth")
    _add_target(synth)
    synth.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the shards; resumes")
    source = synth.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--dialogues", type=positive, metavar="N", help="write N dialogues, turns of the user too"
    )
    source.add_argument("--prompts", type=Path, metavar="FILE", help="answer the chats of a JSONL file")
    synth.add_argument(
        "--openings", type=Path, metavar="FILE", help="lines that invented first turns begin with"
    )
    synth.add_argument(
        "--temperatures", type=non_negative_floats, metavar="T,T", help="an answer draws one of these"
    )
    synth.add_argument("--max-length", type=positive, default=1024, metavar="N", help="tokens of a dialogue")
    synth.add_argument("--batch", type=positive, default=32, metavar="N", help="dialogues in flight at once")
    synth.add_argument("--wave", type=positive, default=1024, metavar="N", help="dialogues per shard")
    synth.add_argument("--max-seconds", type=positive, metavar="S", help="stop after the wave then running")


def add_eval(commands: Commands) -> None:
    """Add `eyas eval`."""
    evaluate = commands.add_parser("eval", help="measure how much of a draft the model accepts")
    evaluate.set_defaults(module="app.cli_eval")
    add_model(evaluate)
    add_questions(evaluate)
    evaluate.add_argument(
        "--draft-mode", choices=("greedy", "sampled"), default="greedy", help="how the engine picks drafts"
    )
    evaluate.add_argument("--profile", type=Path, metavar="FILE", help="write the acceptance profile")
    evaluate.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_questions(parser: argparse.ArgumentParser) -> None:
    """Add what to answer, and how, where acceptance is measured."""
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help="JSONL with turns, prompt or messages"
    )
    parser.add_argument("--turns", type=positive, metavar="N", help="answer N turns of a chat (all)")
    parser.add_argument("--tree", default="auto", metavar="MODE", help="what the engine runs")
    parser.add_argument(
        "--trees",
        type=names,
        metavar="T,T",
        help="trees to measure: chain-K, tree-N",
    )
    parser.add_argument(
        "--temperatures", type=non_negative_floats, default=(0.0,), metavar="T,T", help="0 is greedy"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--seed", type=natural, default=0, metavar="SEED")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="per turn")
    parser.add_argument("--limit", type=positive, metavar="N", help="use the first N prompts")
    parser.add_argument("--batch", type=positive, default=8, metavar="N", help="answers in flight at once")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def add_train(commands: Commands) -> None:
    """Add `eyas train`."""
    train = commands.add_parser("train", help="train a draft head for a model")
    train.set_defaults(module="app.cli_train")
    _add_target(train)
    train.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="PATH",
        help="JSONL of conversations, or a folder of shards",
    )
    train.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="checkpoints, log, and the draft; resumes"
    )
    train.add_argument(
        "--regenerate", action="store_true", help="let the model write the answers of the JSONL"
    )
    train.add_argument("--max-seconds", type=positive, metavar="S", help="save and stop after S seconds")
    train.add_argument(
        "--workers", type=positive, default=1, metavar="N", help="processes, through Ray Train"
    )
    _add_head(train)
    _add_schedule(train)
    _add_objective(train)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2", metavar="M", help="an alias, a folder, or hf://org/name"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=natural, default=0, metavar="SEED")


def _add_head(train: argparse.ArgumentParser) -> None:
    head = train.add_argument_group("head")
    head.add_argument(
        "--head",
        choices=("eagle3", "eagle1"),
        default="eagle3",
        help="eagle3: several taps, unrolled; eagle1: the last feature, one step, with SmoothL1",
    )
    head.add_argument("--layers", type=int, choices=(1, 2, 3), default=2)
    head.add_argument(
        "--draft-vocab", type=positive, metavar="N", help="draft over the N most frequent tokens"
    )
    head.add_argument("--taps", type=natural_list, metavar="N,N", help="read the target after these layers")
    head.add_argument(
        "--feedback", choices=("normed", "raw"), help="eagle3: what the next draft step reads (normed)"
    )


def _add_schedule(train: argparse.ArgumentParser) -> None:
    schedule = train.add_argument_group("schedule")
    schedule.add_argument("--steps", type=positive, default=1000, metavar="N")
    schedule.add_argument("--batch-rows", type=positive, metavar="N", help="rows of a step (32; 4 on a CPU)")
    schedule.add_argument(
        "--row-length", type=positive, metavar="N", help="tokens of a row (1024; 256 on a CPU)"
    )
    schedule.add_argument("--learning-rate", type=float, default=3e-3, metavar="R")
    schedule.add_argument(
        "--warmup-steps", type=natural, metavar="N", help="a tenth of the steps, at most 150"
    )
    schedule.add_argument("--held-out", type=float, default=0.02, metavar="SHARE", help="never trained on")
    schedule.add_argument("--log-every", type=positive, default=20, metavar="N")
    schedule.add_argument("--checkpoint-every", type=positive, default=500, metavar="N")


def _add_objective(train: argparse.ArgumentParser) -> None:
    objective = train.add_argument_group("loss, with the defaults of eagle3 and of eagle1")
    objective.add_argument("--cross-entropy", type=float, metavar="W", help="1.0; 0.1")
    objective.add_argument("--smooth-l1", type=float, metavar="W", help="0.0; 1.0")
    objective.add_argument("--acceptance", type=float, default=0.0, metavar="W", help="1 - sum of min(p, q)")
    objective.add_argument("--unroll-steps", type=positive, metavar="N", help="5; 1")
    objective.add_argument(
        "--step-decay", type=float, default=0.9, metavar="D", help="weight of draft step s: D^s"
    )
    objective.add_argument("--feature-noise", type=float, metavar="U", help="0.0; 0.1 of the features' size")


def add_draft(commands: Commands) -> None:
    """Add `eyas draft`."""
    draft = commands.add_parser("draft", help="import, export, quantize and keep drafts")
    draft.set_defaults(module="app.cli_draft")
    actions = draft.add_subparsers(required=True, metavar="ACTION", dest="action")
    importing = actions.add_parser("import", help="make a draft of a head of EAGLE-1, EAGLE-3 or speculators")
    exporting = actions.add_parser("export", help="write a draft as a checkpoint of another project")
    for action, source in ((importing, "CHECKPOINT"), (exporting, "DRAFT")):
        action.add_argument("source", type=Path, metavar=source, help="a folder")
        action.add_argument("--model", required=True, metavar="M", help="the model that the head is for")
        action.add_argument("--out", type=Path, required=True, metavar="DIR")
    quantizing = actions.add_parser("quantize", help="write a smaller copy of a draft, and what that costs")
    quantizing.add_argument("source", type=Path, metavar="DRAFT", help="a folder")
    quantizing.add_argument("--model", required=True, metavar="M", help="the model that the head is for")
    quantizing.add_argument("--out", type=Path, required=True, metavar="DIR")
    quantizing.add_argument("--precision", choices=("int4", "fp8"), default="int4")
    quantizing.add_argument("--group-size", type=positive, default=64, metavar="N", help="weights per scale")
    quantizing.add_argument("--head", action="store_true", help="quantize the output rows as well")
    add_questions(quantizing)
    add_registry(actions)
    importing.add_argument(
        "--tap-convention",
        choices=("inputs", "outputs"),
        default="inputs",
        help="the checkpoint's list of taps counts states that enter layers, or that leave them",
    )
    exporting.add_argument("--format", choices=("eagle1", "eagle3", "speculators"), required=True)
    exporting.add_argument("--num-drafts", type=positive, default=3, metavar="N", help="drafts per call")
