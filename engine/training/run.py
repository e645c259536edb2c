"""A training run from folders to a folder: data and target in, a draft that `--draft` can load out.

Turning text into data is left to the caller, each part of the run to its own module.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from engine.config import DTypeName, EngineConfig
from engine.draft.config import DraftConfig, HeadStyle
from engine.draft.loader import save_draft
from engine.draft.network import DraftNetwork
from engine.errors import ConfigError, ModelLoadError
from engine.model.config import ModelConfig
from engine.model.llama import LlamaForCausalLM
from engine.runner.calibrate import DTYPES, choose_device, choose_num_threads
from engine.runner.worker import load_target
from engine.training.data_card import DataCard
from engine.training.dataset import (
    Conversations,
    content_keys,
    load_conversations,
    pack,
    split_held_out,
)
from engine.training.evaluate import AcceptanceProfile, measure_ranks, tokens_per_call
from engine.training.head_init import create_head, default_config
from engine.training.ranks import ALONE, Ranks
from engine.training.trainer import Trainer, TrainingConfig
from engine.training.vocab_select import count_tokens, coverage, select_vocab
from engine.tree.library import TreeLibrary
from engine.tree.topology import chain
from engine.weights.digest import folder_digest

DRAFT_FOLDER = "draft"
_REPORTED_CHAINS = (3, 5, 7)
_PROFILE_DEPTH = 7
_PROFILE_RANKS = 8
_MAX_MEASURED = 256  # conversations


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """The shape of a new head. None leaves a choice to the style.

    `vocab_size` None: all of a small vocabulary, a quarter of a large one.
    """

    style: HeadStyle = "eagle3"
    num_layers: int = 2
    taps: tuple[int, ...] | None = None
    vocab_size: int | None = None
    is_feedback_normed: bool | None = None

    def draft_vocab_size(self, target_vocab_size: int) -> int:
        """Return the number of tokens that the head drafts over."""
        if self.vocab_size is None:
            return target_vocab_size if target_vocab_size <= 8192 else target_vocab_size // 4
        if not 1 <= self.vocab_size <= target_vocab_size:
            raise ConfigError(f"draft vocabulary must be 1 to {target_vocab_size}, found {self.vocab_size}")
        return self.vocab_size


@dataclass(frozen=True, slots=True)
class RunSettings:
    """One run: the folders of model, data and result, and how to train. Plain values, for any process.

    Rows hold `row_length` tokens; about `held_out_share` of the conversations are never trained on, and of
    the others about `train_share` are.
    """

    model: Path
    data: Path
    folder: Path
    training: TrainingConfig
    head: HeadSettings = field(default_factory=HeadSettings)
    row_length: int = 1024
    held_out_share: float = 0.01
    train_share: float = 1.0
    dtype: DTypeName = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if self.row_length < 2:
            raise ConfigError(f"row_length must be at least 2, found {self.row_length}")
        if not 0.0 <= self.held_out_share < 1.0:
            raise ConfigError(f"held_out_share must lie in [0, 1), found {self.held_out_share}")
        if not 0.0 < self.train_share <= 1.0:
            raise ConfigError(f"train_share must lie in (0, 1], found {self.train_share}")


@dataclass(frozen=True, slots=True)
class HeldOutMeasure:
    """What a head accepts on known answers: tokens per call by chain, and ranks by depth."""

    num_answers: int
    tokens_per_call: tuple[tuple[str, float], ...]
    profile: AcceptanceProfile


class TrainingRun:
    """Everything of one run in this process, ready to go on from the newest checkpoint."""

    def __init__(self, settings: RunSettings, ranks: Ranks = ALONE) -> None:
        engine_config = EngineConfig(
            settings.model, dtype=settings.dtype, device=settings.device, num_threads=settings.num_threads
        )
        torch.set_num_threads(choose_num_threads(engine_config))
        device = choose_device(engine_config)
        dtype = _choose_dtype(settings.dtype, device)
        model = ModelConfig.load(settings.model)
        self.settings = settings
        self._ranks = ranks
        self._train_data, self._held_out = _load_data(settings, model)
        self._model_digest = folder_digest(settings.model)
        config = _head_config(settings.head, model, self._model_digest)
        counts = count_tokens(self._train_data, model.vocab_size)
        target_ids = select_vocab(counts, config.draft_vocab_size)
        self._coverage = coverage(counts, target_ids)
        self._target = load_target(settings.model, model, config.taps, settings.row_length, dtype, device)
        num_positions = settings.row_length + max(settings.training.objective.unroll_steps, _PROFILE_DEPTH)
        self._head = create_head(config, self._target, target_ids, num_positions, settings.training.seed)
        origin = {
            "model_digest": self._model_digest,
            "data_key": f"{int(content_keys(self._train_data).sum()) % 2**63:016x}",
            "head": dataclasses.asdict(config),
            "row_length": settings.row_length,
            "dtype": str(dtype),
        }
        rows = pack(self._train_data, settings.row_length)
        self._trainer = Trainer(
            self._target, self._head, rows, settings.training, settings.folder, origin, ranks
        )

    def run(self, max_seconds: float = math.inf) -> None:
        """Train to the end, or save and stop after `max_seconds`; at the end write the draft folder.

        Files are written by the first process.
        """
        if self._trainer.train(max_seconds) and self._ranks.is_first:
            self._write_draft()

    def _write_draft(self) -> None:
        """Measure the head and write it with its trees and where it comes from."""
        is_held_out = bool(self._held_out.is_answer.any())
        data = (self._held_out if is_held_out else self._train_data).clip(self.settings.row_length)
        data = data.select(torch.arange(data.num_conversations) < _MAX_MEASURED)
        measured = measure_held_out(self._target, self._head, data)
        profile = measured.profile
        source = "held-out conversations" if is_held_out else "training conversations"
        manifest = self._manifest() | {
            "measured": dict(measured.tokens_per_call),
            "acceptance_profile": {
                "source": source,
                "probabilities": profile.probabilities,
                **dataclasses.asdict(profile),
            },
        }
        trees = library_json(TreeLibrary.search(profile.probabilities))
        save_draft(self._head, self.settings.folder / DRAFT_FOLDER, manifest, trees)

    def _manifest(self) -> dict[str, object]:
        """Return where the head comes from."""
        settings, training = self.settings, self.settings.training
        return {
            "name": f"{settings.model.name}-draft",
            "base_model": {"name": settings.model.name, "folder_digest": self._model_digest},
            "training": dataclasses.asdict(training)
            | {
                "row_length": settings.row_length,
                "num_conversations": self._train_data.num_conversations,
                "num_unique_tokens": self._train_data.token_ids.numel(),
                "num_trained_tokens": self._trainer.step * training.batch_rows * settings.row_length,
                "draft_vocab_coverage": round(self._coverage, 4),
            },
        }


def measure_held_out(target: LlamaForCausalLM, head: DraftNetwork, data: Conversations) -> HeldOutMeasure:
    """Return what `head` would accept of the answers in `data`, which have to fit the rotary table."""
    answers = measure_ranks(target, head, data, _PROFILE_DEPTH)
    num_ranks = min(_PROFILE_RANKS, head.config.draft_vocab_size)
    chains = [chain(depth) for depth in _REPORTED_CHAINS]
    return HeldOutMeasure(
        num_answers=len(answers),
        tokens_per_call=tuple((tree.name, tokens_per_call(answers, tree)) for tree in chains),
        profile=AcceptanceProfile.measure(answers, num_ranks),
    )


def library_json(library: TreeLibrary) -> str:
    """Return the text of a `trees.json` that holds the library's named trees."""
    return json.dumps({name: library.get(name).parents for name in library.names if name != "off"}) + "\n"


def _load_data(settings: RunSettings, model: ModelConfig) -> tuple[Conversations, Conversations]:
    """Return (train, held out) of the data folder, whose tokens are checked against the model."""
    DataCard.load(settings.data).check_model(settings.model)
    data = load_conversations(settings.data)
    low, high = int(data.token_ids.min()), int(data.token_ids.max())
    if low < 0 or high >= model.vocab_size:
        raise ModelLoadError(
            f"{settings.data} holds token ids {low} to {high}, the model has 0 to {model.vocab_size - 1}: "
            "a shard is corrupt, make the data again"
        )
    train, held_out = split_held_out(data, settings.held_out_share)
    if settings.train_share < 1.0:
        # Of what is left, those whose keys lie next to the held-out ones: a share holds every smaller one.
        scaled = settings.held_out_share + settings.train_share * (1 - settings.held_out_share)
        _, train = split_held_out(train, scaled)
    if not train.is_answer.any():
        raise ConfigError(f"{settings.data} holds no answer to train on: add conversations")
    return train, held_out


def _head_config(settings: HeadSettings, model: ModelConfig, model_digest: str) -> DraftConfig:
    vocab_size = settings.draft_vocab_size(model.vocab_size)
    config = default_config(model, vocab_size, settings.num_layers, model_digest, settings.style)
    is_normed = settings.is_feedback_normed
    return dataclasses.replace(
        config,
        taps=config.taps if settings.taps is None else settings.taps,
        is_feedback_normed=config.is_feedback_normed if is_normed is None else is_normed,
    )


def _choose_dtype(name: DTypeName, device: torch.device) -> torch.dtype:
    """Return the dtype asked for; "auto" is bfloat16 on CUDA and float32 on a CPU."""
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if device.type == "cuda" else torch.float32
