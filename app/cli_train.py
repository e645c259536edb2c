"""`eyas train`: a draft head is trained for a model, from a file of conversations or a folder of shards.

The training itself is left to the engine's `training`.
"""

import argparse
import math
from pathlib import Path
from typing import TextIO

import torch

from app.prompt_file import read_chats
from app.training_data import chat_tokens, check_same_kind, plan_of_chats, synthesize, write_answered
from engine import ConfigError, EngineConfig, resolve_model
from engine.draft.loader import MANIFEST
from engine.training.checkpoint import last_step
from engine.training.losses import LossWeights
from engine.training.online import Objective
from engine.training.run import DRAFT_FOLDER, HeadSettings, RunSettings, TrainingRun
from engine.training.synth import SynthSettings
from engine.training.trainer import TrainingConfig
from engine.weights.digest import file_digest
from engine.weights.json_object import read_json_object

DATA_FOLDER = "data"


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Prepare the data, train, and write the draft folder and what it accepts."""
    model = resolve_model(options.model)
    settings = read_settings(options, model)
    max_seconds = options.max_seconds or math.inf
    if not options.data.is_dir() and not prepare_file(options, model, settings):
        out.write("stopped while the model wrote answers; run again to go on\n")
        return 0
    train(settings, options.workers, max_seconds)
    step = last_step(settings.folder)
    if step < options.steps:
        out.write(f"stopped after step {step} of {options.steps}; run again to go on\n")
    else:
        out.write(report(settings.folder / DRAFT_FOLDER))
    return 0


def train(settings: RunSettings, num_workers: int, max_seconds: float) -> None:
    """Train to the end or until time is up, in this process or in several."""
    if num_workers > 1:
        try:
            from app.train_workers import train_with_workers
        except ImportError as error:
            raise ConfigError("more than one worker needs Ray Train: pip install 'eyas[train]'") from error
        train_with_workers(settings, num_workers, max_seconds)
    else:
        TrainingRun(settings).run(max_seconds)


def prepare_file(options: argparse.Namespace, model: Path, settings: RunSettings) -> bool:
    """Turn the JSONL file into the run's data folder; return False where time ran out on the way."""
    chats = read_chats(options.data)
    if options.regenerate:
        chats = [chat.without_answers() for chat in chats]
    if check_same_kind(chats, options.data):
        write_answered(chats, options.data, model, settings.data)
        return True
    synth = SynthSettings(max_length=settings.row_length, seed=options.seed)
    config = EngineConfig(model, dtype=options.dtype, device=options.device, max_num_waiting=1024)
    _, is_done = synthesize(
        config,
        plan_of_chats(chats, chat_tokens(model), synth),
        len(chats),
        synth,
        {"file": file_digest(options.data), "answers": "by the model"},
        settings.data,
        options.max_seconds or math.inf,
    )
    return is_done


def read_settings(options: argparse.Namespace, model: Path) -> RunSettings:
    """Return the run that the options ask for. Raises `ConfigError`."""
    is_cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    warmup_steps = options.warmup_steps
    training = TrainingConfig(
        num_steps=options.steps,
        batch_rows=options.batch_rows or (32 if is_cuda else 4),
        learning_rate=options.learning_rate,
        warmup_steps=min(150, options.steps // 10) if warmup_steps is None else warmup_steps,
        objective=read_objective(options),
        seed=options.seed,
        log_every=options.log_every,
        checkpoint_every=options.checkpoint_every,
    )
    head = HeadSettings(
        style=options.head,
        num_layers=options.layers,
        taps=options.taps,
        vocab_size=options.draft_vocab,
        is_feedback_normed=None if options.feedback is None else options.feedback == "normed",
    )
    if not options.data.exists():
        raise ConfigError(f"data must be a JSONL file or a folder of shards, found no {options.data}")
    return RunSettings(
        model=model,
        data=options.data if options.data.is_dir() else options.out / DATA_FOLDER,
        folder=options.out,
        training=training,
        head=head,
        row_length=options.row_length or (1024 if is_cuda else 256),
        held_out_share=options.held_out,
        dtype=options.dtype,
        device=options.device,
    )


def read_objective(options: argparse.Namespace) -> Objective:
    """Return the loss of the options; what is not given is the head's own default."""
    is_eagle1 = options.head == "eagle1"

    def choose(given: float | None, eagle3: float, eagle1: float) -> float:
        return (eagle1 if is_eagle1 else eagle3) if given is None else given

    losses = LossWeights(
        cross_entropy=choose(options.cross_entropy, 1.0, 0.1),
        smooth_l1=choose(options.smooth_l1, 0.0, 1.0),
        acceptance=options.acceptance,
    )
    return Objective(
        unroll_steps=options.unroll_steps or (1 if is_eagle1 else 5),
        step_decay=options.step_decay,
        feature_noise=choose(options.feature_noise, 0.0, 0.1),
        losses=losses,
    )


def report(draft: Path) -> str:
    """Return what the trained head of a draft folder accepts, for a reader."""
    manifest = read_json_object(draft / MANIFEST)
    profile = manifest["acceptance_profile"]
    lines = [f"draft: {draft}", f"on {profile['source']}:"]
    lines += [f"{name}: {value:.3f} tokens per call" for name, value in manifest["measured"].items()]
    lines.append("depth  top-1  any rank")
    for depth, row in enumerate(profile["probabilities"], start=1):
        lines.append(f"{depth:>5}  {row[0]:.3f}  {sum(row):.3f}")
    return "\n".join([*lines, ""])
