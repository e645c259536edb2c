"""`eyas eval`: how much of a draft a model accepts on a file of prompts.

The measuring is left to `evaluation`.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from app.chat_tokens import ChatTokens
from app.evaluation import Answers, Evaluation, Question, TreeMeasure, answer, evaluate
from app.local_model import LocalModel, check_length
from app.machine import describe_machine
from app.prompt_file import Chat, read_chats
from engine import (
    ConfigError,
    EngineConfig,
    EngineFacts,
    MeasuredProfile,
    SamplingParams,
    SpeculationConfig,
)
from engine.config import DraftMode
from engine.draft.loader import load_draft
from engine.training.evaluate import AcceptanceProfile
from engine.training.pair import NetworkPair
from engine.tree.library import TreeLibrary
from engine.tree.topology import TreeTopology

CHAINS = ("chain-3", "chain-5", "chain-7")


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Answer the prompts at every temperature, measure the trees on the answers, and write what came out."""
    chats = read_chats(options.prompts, options.limit)
    model = open_model(options, options.draft, options.draft_mode)
    draft = model.config.draft
    if draft is None:
        raise ConfigError("eval measures a draft, and this model has none: name a folder with --draft")
    trees = choose_trees(options.trees, draft)
    facts, answers = answer_all(options, chats, model)
    pair = load_pair(facts, model.config.model, draft, answers)
    results = [evaluate(part, pair, options.tree, trees) for part in answers]
    if options.profile is not None:
        write_profile(options.profile, facts, results)
    evaluations = [evaluation for evaluation, _ in results]
    out.write((_json_report if options.json else text_report)(facts, len(chats), evaluations))
    return 0


def open_model(options: argparse.Namespace, draft: str, draft_mode: DraftMode = "greedy") -> LocalModel:
    """Return the model of the options with a draft."""
    sizes = EngineConfig(
        Path(options.model),
        dtype=options.dtype,
        device=options.device,
        max_num_seqs=options.batch,
        speculation=SpeculationConfig(draft_mode=draft_mode),
    )
    return LocalModel.open(sizes, options.model, draft)


def answer_all(
    options: argparse.Namespace, chats: Sequence[Chat], model: LocalModel
) -> tuple[EngineFacts, list[Answers]]:
    """Return the engine's facts and its answers at every temperature; the engine itself is gone."""
    engine = model.engine()
    tokens = ChatTokens(model.template, model.tokenizer, engine.facts.eos_token_ids)
    questions = []
    for chat in chats:
        turns = tokens.given_turns(chat.without_answers() if chat.is_answered else chat)
        questions.append(Question(tuple(turns[: options.turns]), chat.category))
    check_length(max(len(q.turns[0]) for q in questions), options.max_tokens, engine.facts.max_model_len)
    answers = []
    for temperature in options.temperatures:
        sampling = SamplingParams(
            temperature=temperature,
            top_p=options.top_p,
            max_tokens=options.max_tokens,
            seed=options.seed,
            speculation=options.tree,
        )
        answers.append(answer(engine, questions, sampling))
    return engine.facts, answers


def choose_trees(names: Sequence[str] | None, draft: Path) -> list[TreeTopology]:
    """Return the named trees; without names three chains and those of the draft. Raises `ConfigError`."""
    path = load_draft(draft).trees
    library = TreeLibrary.search() if path is None else TreeLibrary.load(path)
    return [library.get(name) for name in names or (*CHAINS, *(n for n in library.names if n != "off"))]


def load_pair(facts: EngineFacts, model: Path, draft: Path, answers: Sequence[Answers]) -> NetworkPair:
    """Return the networks as the engine ran them, for texts as long as the longest answer's."""
    num_tokens = max(len(dialogue.token_ids) for part in answers for dialogue in part.dialogues)
    dtype = getattr(torch, facts.dtype)
    return NetworkPair.load(model, draft, max(num_tokens, 1), dtype, torch.device(facts.device))


def write_profile(
    path: Path, facts: EngineFacts, results: Sequence[tuple[Evaluation, AcceptanceProfile]]
) -> None:
    """Write the acceptance profile from which trees are searched: the first temperature's, then all."""
    parts = [
        {"temperature": evaluation.temperature, "probabilities": profile.probabilities}
        | dataclasses.asdict(profile)
        for evaluation, profile in results
    ]
    (evaluation, profile), *_ = results
    source = (
        f"{evaluation.engine.num_answers} answers of {facts.model_name} at temperature "
        f"{evaluation.temperature:g}, draft {str(facts.draft_digest)[:12]}"
    )
    counts = dataclasses.asdict(profile) | {"environment": describe_machine(facts), "by_temperature": parts}
    try:
        MeasuredProfile(source, profile.probabilities).save(path, counts)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def text_report(facts: EngineFacts, num_prompts: int, evaluations: Sequence[Evaluation]) -> str:
    """Return the report for a reader."""
    lines = [f"{name}: {value}" for name, value in describe_machine(facts).items()]
    lines.append(f"prompts: {num_prompts}")
    for evaluation in evaluations:
        own = evaluation.engine
        counts = f"{own.num_answers} answers, {own.num_tokens} tokens"
        lines += [
            "",
            f"temperature {evaluation.temperature:g}: {counts}, {evaluation.num_repeating} repeat themselves",
            f"tokens per call, as the engine ran ({own.tree}): {own.tokens_per_call:.3f}",
            *_tree_table(evaluation),
            "",
            "depth  reached  top-1  95% interval   accepted by rank",
            *(_depth_line(row.depth, row.reached, row.top, row.low, row.high, row.accepted)
              for row in evaluation.depths),
        ]  # fmt: skip
    return "\n".join([*lines, ""])


def _tree_table(evaluation: Evaluation) -> list[str]:
    """Return one line per tree: all answers, those that do not repeat, the ceiling, then each category."""
    categories = [name for name, _ in evaluation.categories]
    heading = f"{'tree':<10} {'all':>6} {'95% interval':>14} {'steady':>7} {'ceiling':>8}"
    lines = [" ".join([heading, *(f"{name[:10]:>10}" for name in categories)])]
    unrepeated = {row.tree: row.tokens_per_call for row in evaluation.unrepeated}
    for idx, row in enumerate(evaluation.trees):
        own: list[TreeMeasure] = [rows[idx] for _, rows in evaluation.categories]
        cells = [
            f"{row.tree:<10} {row.tokens_per_call:>6.3f} {row.low:>6.3f}, {row.high:>6.3f}",
            f"{unrepeated.get(row.tree, math.nan):>7.3f} {evaluation.ceiling[idx].tokens_per_call:>8.3f}",
            *(f"{cell.tokens_per_call:>10.3f}" for cell in own),
        ]
        lines.append(" ".join(cells))
    return lines


def _depth_line(
    depth: int, reached: int, top: float, low: float, high: float, accepted: Sequence[int]
) -> str:
    counts = " ".join(str(count) for count in accepted)
    return f"{depth:>5} {reached:>8}  {top:.3f}  {low:.3f}, {high:.3f}   {counts}"


def _json_report(facts: EngineFacts, num_prompts: int, evaluations: Sequence[Evaluation]) -> str:
    report: dict[str, Any] = {
        "environment": describe_machine(facts),
        "num_prompts": num_prompts,
        "evaluations": [dataclasses.asdict(evaluation) for evaluation in evaluations],
    }
    return json.dumps(report, indent=2) + "\n"
