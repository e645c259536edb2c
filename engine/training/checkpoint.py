"""Checkpoints of a training run: masters, optimizer moments and the settings they belong to, in one file
each.

A file appears whole or not at all, so whatever ends a run leaves the earlier ones. When to write one is left
to `trainer`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ConfigError, ModelLoadError
from engine.weights.safetensors import SafetensorsFile, write_safetensors

NUM_KEPT = 2
_PATTERN = "checkpoint-*.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def checkpoint_paths(folder: Path) -> list[Path]:
    """Return the checkpoints of a training folder, oldest first."""
    return sorted(folder.glob(_PATTERN))


def last_step(folder: Path) -> int:
    """Return the steps that the newest checkpoint has seen; 0 without one."""
    paths = checkpoint_paths(folder)
    return int(paths[-1].stem.removeprefix("checkpoint-")) if paths else 0


def save_checkpoint(
    folder: Path,
    step: int,
    settings: Mapping[str, object],
    masters: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write the state after `step` steps and drop all but the newest few files. Passes `OSError` on."""
    tensors = {}
    for idx, master in enumerate(masters):
        tensors[f"{idx}.master"] = master
        for name in _MOMENTS:
            tensors[f"{idx}.{name}"] = optimizer.state[master][name]
    metadata = {"step": str(step), "settings": json.dumps(settings, sort_keys=True)}
    write_safetensors(folder / f"checkpoint-{step:07d}.safetensors", tensors, metadata)
    for old in checkpoint_paths(folder)[:-NUM_KEPT]:
        old.unlink()


@torch.no_grad()
def load_checkpoint(
    path: Path, settings: Mapping[str, object], masters: Sequence[Tensor], optimizer: torch.optim.Optimizer
) -> int:
    """Fill `masters` and the optimizer's moments from `path` and return the number of steps they have seen.

    Raises `ConfigError` naming the first setting that differs, and `ModelLoadError` for a damaged file.
    """
    file = SafetensorsFile(path)
    try:
        step, stored = int(file.metadata["step"]), json.loads(file.metadata["settings"])
    except (KeyError, ValueError) as error:
        raise ModelLoadError(
            f"{path} is not a training checkpoint: remove it to go on from another"
        ) from error
    _check_settings(path, stored, json.loads(json.dumps(settings)))
    names = {f"{idx}.{name}" for idx in range(len(masters)) for name in ("master", *_MOMENTS)}
    if file.names() != names:
        raise ModelLoadError(
            f"{path} does not hold the tensors of this head: remove it to go on from another"
        )
    for idx, master in enumerate(masters):
        master.copy_(file.read(f"{idx}.master"))
        moments = {name: file.read(f"{idx}.{name}").to(master.device) for name in _MOMENTS}
        optimizer.state[master] = {"step": torch.tensor(float(step)), **moments}
    return step


def _check_settings(path: Path, stored: object, wanted: Mapping[str, object]) -> None:
    if not isinstance(stored, dict):
        raise ModelLoadError(f"{path} is not a training checkpoint: remove it to go on from another")
    for key in sorted(stored.keys() | wanted.keys()):
        if stored.get(key) != wanted.get(key):
            raise ConfigError(
                f"{path} was trained with other settings: {key} was {stored.get(key)!r} and is now "
                f"{wanted.get(key)!r}; use a fresh folder, or the old setting"
            )
