"""Trains drafts that differ in one thing each, for equal tokens, and measures what each accepts.

    python benchmarks/draft_study.py ablation --model smollm2 --data data --prompts mt_bench.jsonl --out study

Rows that stand in OUT/results.json are not run again, whichever study they were run for; an interrupted row
goes on from its checkpoint. The answers that rows are measured on are kept in OUT/answers.json: with these
two files and the data a study goes on on another machine. `draft_tables.py` prints the results. A result
names the tokens trained and everything that a row changes.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from app.chat_tokens import ChatTokens
from app.evaluation import Answers, Question, answer, evaluate
from app.prompt_file import read_chats
from app.training_data import chat_tokens
from engine import Engine, EngineConfig, SamplingParams, resolve_model
from engine.training.checkpoint import last_step
from engine.training.dialogue import Answer, Dialogue
from engine.training.losses import LossWeights
from engine.training.online import Objective
from engine.training.pair import NetworkPair
from engine.training.run import DRAFT_FOLDER, HeadSettings, RunSettings, TrainingRun
from engine.training.trainer import TrainingConfig
from engine.tree.library import TreeLibrary

TREES = ("chain-3", "chain-5", "chain-7", "tree-8", "tree-16", "tree-32")
EAGLE1_LOSS = LossWeights(cross_entropy=0.1, smooth_l1=1.0)  # arXiv 2508.08192


@dataclass(frozen=True, slots=True)
class Row:
    """One draft of a study."""

    name: str
    head: HeadSettings
    objective: Objective = dataclasses.field(default_factory=Objective)
    token_share: float = 1.0
    train_share: float = 1.0


BASE = Row("eagle3, 2 layers", HeadSettings())
SHORT = Row("eagle3, short training", HeadSettings(), token_share=0.25)


def ablation_rows() -> Iterator[Row]:
    """Yield the rows of the ablation: the first is what the others are compared with."""
    eagle1 = Objective(unroll_steps=1, feature_noise=0.1, losses=EAGLE1_LOSS)
    yield BASE
    yield Row("eagle3, 1 layer", HeadSettings(num_layers=1))
    yield Row("eagle3, 3 layers", HeadSettings(num_layers=3))
    yield Row("eagle3, with SmoothL1", HeadSettings(), Objective(losses=LossWeights(1.0, 0.1)))
    yield Row("eagle3, acceptance loss", HeadSettings(), Objective(losses=LossWeights(1.0, 0.0, 1.0)))
    yield Row("eagle3, raw feedback", HeadSettings(is_feedback_normed=False))
    yield Row("eagle3, one step", HeadSettings(), Objective(unroll_steps=1))
    yield Row("eagle3, whole vocabulary", HeadSettings(vocab_size=-1))
    yield SHORT
    yield Row("eagle1, 1 layer", HeadSettings("eagle1", 1), eagle1)
    yield Row("eagle1, 3 layers", HeadSettings("eagle1", 3), eagle1)
    yield Row(
        "eagle1, 3 layers, without SmoothL1",
        HeadSettings("eagle1", 3),
        dataclasses.replace(eagle1, losses=LossWeights()),
    )


def scaling_rows() -> Iterator[Row]:
    """Yield points of tokens per call against unique tokens at equal epochs, and against trained tokens; two
    of them are rows of the ablation.
    """
    for share in (1 / 16, 1 / 8, 1 / 4, 1 / 2):
        yield Row(
            f"{share:g} of the data, as many epochs", HeadSettings(), token_share=share, train_share=share
        )
    yield BASE
    for share in (1 / 16, 1 / 4):
        yield Row(f"{share:g} of the data, as many tokens", HeadSettings(), train_share=share)
    yield Row("all data, 0.125 of the tokens", HeadSettings(), token_share=1 / 8)
    yield SHORT
    yield Row("all data, 0.5 of the tokens", HeadSettings(), token_share=1 / 2)


STUDIES = {"ablation": ablation_rows, "scaling": scaling_rows}


def main() -> None:
    options = read_options()
    begin = time.perf_counter()
    model = resolve_model(options.model)
    options.out.mkdir(parents=True, exist_ok=True)
    answers = answer_prompts(options, model)
    path = options.out / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for row in chosen_rows(options):
        if row.name in results:
            continue
        left = options.max_seconds - (time.perf_counter() - begin)
        if left <= 0:
            break
        folder = options.out / row.name.replace(", ", "-").replace(" ", "_").replace("/", "_")
        settings = row_settings(options, row, model, folder)
        started = time.perf_counter()
        TrainingRun(settings).run(left)
        if last_step(folder) < settings.training.num_steps:
            print(f"{row.name}: stopped after step {last_step(folder)} of {settings.training.num_steps}")
            break
        results[row.name] = measure(settings, answers) | {"seconds": round(time.perf_counter() - started)}
        path.write_text(json.dumps(results, indent=2) + "\n")
        chains = results[row.name]["temperatures"]["0"]["trees"]
        print(f"{row.name}: chain-3 {chains['chain-3']['tokens_per_call']:.3f}", flush=True)


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    """Return the rows of the study, or those named. Raises `SystemExit` for a name that no row has."""
    rows = list(STUDIES[options.study]())
    unknown = set(options.rows or ()) - {row.name for row in rows}
    if unknown:
        names = "; ".join(row.name for row in rows)
        raise SystemExit(f"no row is called {', '.join(map(repr, sorted(unknown)))}: there are {names}")
    return [row for row in rows if not options.rows or row.name in options.rows]


def row_settings(options: argparse.Namespace, row: Row, model: Path, folder: Path) -> RunSettings:
    """Return the run of a row: its share of --tokens, rounded to whole steps."""
    num_steps = max(1, round(options.tokens * row.token_share / (options.batch_rows * options.row_length)))
    head = row.head
    if head.vocab_size == -1:
        head = dataclasses.replace(
            head, vocab_size=json.loads((model / "config.json").read_text())["vocab_size"]
        )
    elif options.draft_vocab:
        head = dataclasses.replace(head, vocab_size=options.draft_vocab)
    training = TrainingConfig(
        num_steps=num_steps,
        batch_rows=options.batch_rows,
        warmup_steps=min(150, num_steps // 10),
        objective=row.objective,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    return RunSettings(
        model,
        options.data,
        folder,
        training,
        head,
        row_length=options.row_length,
        train_share=row.train_share,
    )


def answer_prompts(options: argparse.Namespace, model: Path) -> list[Answers]:
    """Return the target's own answers at temperature 0 and 1, which every row is measured on: those kept, or
    new ones, which are kept. Raises `SystemExit` where those kept are to other questions.
    """
    path = options.out / "answers.json"
    tokens: ChatTokens = chat_tokens(model)
    chats = read_chats(options.prompts, options.limit)
    questions = [Question(tuple(tokens.given_turns(chat.without_answers())), chat.category) for chat in chats]
    asked = hashlib.sha256(repr((questions, options.max_tokens, options.seed)).encode()).hexdigest()
    if path.is_file():
        kept = json.loads(path.read_text())
        if kept["asked"] != asked:
            raise SystemExit(f"{path} holds answers to other prompts, or with another --max-tokens or --seed")
        return [read_answers(part) for part in kept["answers"]]
    engine = Engine.load(EngineConfig(model, max_num_seqs=options.batch))
    samplings = [
        SamplingParams(temperature=temperature, max_tokens=options.max_tokens, seed=options.seed)
        for temperature in (0.0, 1.0)
    ]
    answers = [answer(engine, questions, sampling) for sampling in samplings]
    parts = [dataclasses.asdict(part) for part in answers]
    path.write_text(json.dumps({"asked": asked, "answers": parts}) + "\n")
    return answers


def read_answers(part: dict[str, Any]) -> Answers:
    """Return answers from what `dataclasses.asdict` made of them."""
    dialogues = tuple(
        Dialogue(
            tuple(dialogue["token_ids"]),
            tuple(dialogue["is_answer"]),
            tuple(Answer(tuple(kept["token_ids"]), kept["num_calls"]) for kept in dialogue["answers"]),
        )
        for dialogue in part["dialogues"]
    )
    return Answers(
        part["temperature"], dialogues, tuple(part["categories"]), tuple(part["accepted_by_depth"])
    )


def measure(settings: RunSettings, answers: list[Answers]) -> dict[str, Any]:
    """Return what the draft of a finished run does on the answers, and what it was trained on."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    draft = settings.folder / DRAFT_FOLDER
    num_tokens = max(len(dialogue.token_ids) for part in answers for dialogue in part.dialogues)
    pair = NetworkPair.load(settings.model, draft, num_tokens, dtype, device)
    library = TreeLibrary.load(draft / "trees.json")
    manifest = json.loads((draft / "manifest.json").read_text())
    temperatures = {}
    for part in answers:
        evaluation, _ = evaluate(part, pair, "off", [library.get(name) for name in TREES])
        temperatures[f"{part.temperature:g}"] = {
            "trees": {row.tree: dataclasses.asdict(row) for row in evaluation.trees},
            "unrepeated": {row.tree: row.tokens_per_call for row in evaluation.unrepeated},
            "ceiling": {row.tree: row.tokens_per_call for row in evaluation.ceiling},
        }
    return {
        "parameters": sum(parameter.numel() for parameter in pair.head.parameters()),
        "training": manifest["training"],
        "head": dataclasses.asdict(pair.head.config),
        "held_out": manifest["measured"],
        "temperatures": temperatures,
    }


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train drafts that differ in one thing each.")
    parser.add_argument("study", choices=tuple(STUDIES))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder of shards, as eyas synth writes it"
    )
    parser.add_argument("--prompts", type=Path, required=True, help="chats that nothing was trained on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="of the study, all by default")
    parser.add_argument("--tokens", type=float, default=100e6, help="trained tokens of a whole row")
    parser.add_argument("--batch-rows", type=int, default=32)
    parser.add_argument("--row-length", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--draft-vocab", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="use the first prompts")
    parser.add_argument("--batch", type=int, default=32, help="answers in flight at once")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--max-seconds", type=float, default=math.inf, help="save and stop; run again to go on"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
