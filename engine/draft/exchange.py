"""Drafts from folder to folder: imported from another project's checkpoint, exported to one, quantized.

What each format means is left to its own file.
"""

import dataclasses
import json
from pathlib import Path

import torch
from torch import Tensor

from engine.draft.formats import (
    CONFIG,
    SAFETENSORS,
    Format,
    TapConvention,
    detect_format,
    read_checkpoint,
)
from engine.draft.formats_eagle import read_eagle1, read_eagle3, write_eagle1, write_eagle3
from engine.draft.formats_speculators import read_speculators, write_speculators
from engine.draft.loader import MANIFEST, check_vocabulary, load_draft, save_draft, write_draft
from engine.draft.quantize import Precision, quantize_tensors
from engine.errors import ConfigError, ModelLoadError
from engine.model.config import ModelConfig
from engine.weights.digest import folder_digest
from engine.weights.json_object import read_json_object
from engine.weights.safetensors import write_safetensors
from engine.weights.shards import open_weights

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def import_draft(source: Path, model: Path, folder: Path, convention: TapConvention) -> Format:
    """Write the checkpoint in `source`, made for the target in `model`, as our folder; return its format.

    Weights keep their dtype. Raises `ModelLoadError` or `DraftMismatchError`.
    """
    checkpoint = read_checkpoint(source)
    target, digest = ModelConfig.load(model), folder_digest(model)
    kind = detect_format(checkpoint)
    if kind == "eagle1":
        head = read_eagle1(checkpoint, target, digest)
    elif kind == "eagle3":
        head = read_eagle3(checkpoint, target, digest, convention)
    else:
        head = read_speculators(checkpoint, target, digest, convention)
    check_vocabulary(head.target_ids, target.vocab_size)
    manifest: dict[str, object] = {
        "name": source.resolve().name,
        "imported_from": kind,
        "tap_convention": convention,
        "base_model": {"name": model.name, "folder_digest": digest},
    }
    save_draft(head, folder, manifest, dtype=checkpoint.take("fc.weight").dtype)
    return kind


def quantize_draft(
    draft: Path, model: Path, folder: Path, precision: Precision, group_size: int, has_head: bool
) -> dict[str, float]:
    """Write a quantized copy of our folder `draft`; return the relative error of each matrix.

    With `has_head` the drafted rows of the target's output head become the draft's own, quantized too.
    """
    if folder.resolve() == draft.resolve():
        raise ConfigError("a quantized draft needs a folder of its own")
    loaded, target = load_draft(draft), ModelConfig.load(model)
    loaded.config.check_target(target, folder_digest(model))
    head = loaded.build(*_target_rows(model, target), 1, torch.float32, torch.device("cpu"))
    config, state = head.config, {name: _as_bfloat16(value) for name, value in head.state_dict().items()}
    if has_head:
        config = dataclasses.replace(config, has_own_head=True)
        state["head_rows"] = head.head_rows
    quantized = quantize_tensors(state, precision, group_size, has_head)
    manifest: dict[str, object] = {
        **{key: value for key, value in read_json_object(draft / MANIFEST).items() if key != "files"},
        "quantized": {"precision": precision, "group_size": group_size, "output_rows": has_head},
    }
    trees = None if loaded.trees is None else loaded.trees.read_text(encoding="utf-8")
    write_draft(config, quantized.tensors, folder, manifest, trees)
    return dict(quantized.relative_errors)


def _as_bfloat16(value: Tensor) -> Tensor:
    return value.bfloat16() if value.is_floating_point() else value


def _target_rows(model: Path, target: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return the embedding and the output head of a target, [V, H] float32."""
    weights = open_weights(model)
    embedding = weights.read(_EMBEDDING).float()
    return embedding, embedding if target.tie_word_embeddings else weights.read(_HEAD).float()


def export_draft(draft: Path, model: Path, folder: Path, kind: Format, num_drafts: int) -> None:
    """Write our folder `draft`, made for the target in `model`, as a checkpoint of format `kind`.

    Raises `ConfigError` where the format cannot say what the head does.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: export to a fresh folder")
    loaded, target = load_draft(draft), ModelConfig.load(model)
    loaded.config.check_target(target, folder_digest(model))
    head = loaded.build(*_target_rows(model, target), 1, torch.float32, torch.device("cpu"))
    if kind == "eagle1":
        fields, tensors = write_eagle1(head)
    elif kind == "eagle3":
        fields, tensors = write_eagle3(head)
    else:
        fields, tensors = write_speculators(head, str(model), num_drafts)
    dtype = loaded.dtype
    stored = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()
    }
    fields["torch_dtype"] = str(dtype).removeprefix("torch.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(folder / SAFETENSORS, stored, {"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(f"cannot write {folder}: {error.strerror or error}") from error
