"""`eyas synth`: a model writes the training data of its draft.

The writing itself is left to the engine's `training`.
"""

import argparse
import math
from pathlib import Path
from typing import TextIO

from app.chat_tokens import ChatTokens
from app.openings import openings
from app.prompt_file import read_chats
from app.training_data import chat_tokens, plan_of_chats, synthesize
from engine import ConfigError, EngineConfig, resolve_model
from engine.training.dialogue import Span
from engine.training.synth import SynthCounts, SynthSettings, plan_invented
from engine.weights.digest import file_digest


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Write dialogues until all are there or time is up, and say what became of them."""
    model = resolve_model(options.model)
    given = {} if options.temperatures is None else {"temperatures": options.temperatures}
    settings = SynthSettings(
        max_length=options.max_length, wave_size=options.wave, seed=options.seed, **given
    )
    tokens = chat_tokens(model)
    source: dict[str, object]
    if options.prompts is not None:
        chats = [chat.without_answers() for chat in read_chats(options.prompts)]
        plan, num_dialogues = plan_of_chats(chats, tokens, settings), len(chats)
        source = {"file": file_digest(options.prompts), "answers": "by the model"}
    else:
        frame = tokens.frame(read_openings(options.openings, tokens))
        num_dialogues = options.dialogues

        def plan(dialogue_idx: int) -> list[Span]:
            return plan_invented(frame, settings, dialogue_idx)

        openings_digest = None if options.openings is None else file_digest(options.openings)
        source = {"openings": openings_digest, "answers": "by the model"}
    config = EngineConfig(
        model, dtype=options.dtype, device=options.device, max_num_seqs=options.batch, max_batched_tokens=2048
    )
    counts, is_done = synthesize(
        config, plan, num_dialogues, settings, source, options.out, options.max_seconds or math.inf
    )
    out.write(report(options.out, counts, is_done))
    return 0


def read_openings(path: Path | None, tokens: ChatTokens) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the lines of `path`; without a file those of our own."""
    if path is None:
        lines = openings()
    else:
        try:
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
    return tuple(tokens.encode_text(line) for line in lines)


def report(folder: Path, counts: SynthCounts, is_done: bool) -> str:
    """Return what became of the dialogues, for a reader."""
    return (
        f"{folder}: {counts.num_kept} dialogues of {counts.num_tokens} tokens, {counts.num_answer_tokens} of "
        f"them answers\ndropped: {counts.num_unanswered} without an answer, {counts.num_repeated} repeated; "
        f"cut at a loop: {counts.num_looped}\n" + ("" if is_done else "not done: run again to go on\n")
    )
