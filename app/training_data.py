"""Files of chats as folders of training data.

Reading the file is left to `prompt_file`, answering to the engine's `synth`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from app.chat import ChatTemplate
from app.chat_tokens import ChatTokens
from app.prompt_file import Chat
from app.tokenizer import Tokenizer
from engine import ConfigError, Engine, EngineConfig, TrainingError
from engine.model.config import ModelConfig
from engine.training.data_card import DataCard
from engine.training.dataset import ShardWriter, shard_paths
from engine.training.dialogue import Span
from engine.training.synth import SynthCounts, SynthRun, SynthSettings, plan_given
from engine.weights.digest import file_digest


def chat_tokens(model: Path) -> ChatTokens:
    """Return the token side of the chats of a model folder."""
    return ChatTokens(ChatTemplate(model), Tokenizer(model), ModelConfig.load(model).eos_token_ids)


def check_same_kind(chats: Sequence[Chat], path: Path) -> bool:
    """Return whether the chats have answers; raises `ConfigError` where only some have."""
    kinds = [chat.is_answered for chat in chats]
    if any(kinds) and not all(kinds):
        raise ConfigError(
            f"{path}: chat {kinds.index(True) + 1} has an answer to each turn, chat {kinds.index(False) + 1} "
            "has not: give all, or let the model write all with --regenerate"
        )
    return kinds[0]


def write_answered(chats: Sequence[Chat], source: Path, model: Path, folder: Path) -> None:
    """Turn chats that have their answers into shards; a folder that already holds just these is left."""
    card = DataCard.of(model, {"file": file_digest(source), "answers": "from the file"})
    if shard_paths(folder):
        if DataCard.load(folder) != card:
            raise ConfigError(f"{folder} holds data of another file or model: use a fresh folder")
        return
    tokens = chat_tokens(model)
    encoded = [tokens.encode_answered(chat) for chat in chats]
    try:
        card.save(folder)
        with ShardWriter(folder) as writer:
            for token_ids, is_answer in encoded:
                writer.add(torch.tensor(token_ids), torch.tensor(is_answer))
    except OSError as error:
        raise TrainingError(f"cannot write to {folder}: {error.strerror or error}") from error


def plan_of_chats(
    chats: Sequence[Chat], tokens: ChatTokens, settings: SynthSettings
) -> Callable[[int], Sequence[Span]]:
    """Return the plan by which the model answers `chats`."""
    turns = [tokens.given_turns(chat) for chat in chats]
    return lambda idx: plan_given(turns[idx], settings, idx)


def synthesize(
    engine_config: EngineConfig,
    plan: Callable[[int], Sequence[Span]],
    num_dialogues: int,
    settings: SynthSettings,
    source: dict[str, object],
    folder: Path,
    max_seconds: float,
) -> tuple[SynthCounts, bool]:
    """Let the model write dialogues into `folder`; return the counts, and whether all are written."""
    begin = time.perf_counter()
    model = engine_config.model
    # The number of dialogues is no part of the card: more of the same data may follow.
    card = DataCard.of(model, {**source, "settings": asdict(settings)})
    try:
        run = SynthRun(folder, card, settings, plan, num_dialogues)
        if not run.is_done:
            engine = Engine.load(engine_config)
            with tqdm(total=num_dialogues, initial=run.num_written, desc="dialogues", disable=None) as bar:
                while not run.is_done and time.perf_counter() - begin < max_seconds:
                    bar.update(run.write_wave(engine))
                    bar.set_postfix(tokens=run.counts.num_tokens, kept=run.counts.num_kept)
    except OSError as error:
        raise TrainingError(
            f"cannot write to {folder}: {error.strerror or error}; shards written before stay: make room and "
            "start again"
        ) from error
    return run.counts, run.is_done
