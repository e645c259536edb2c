"""Import and export of draft heads: a checkpoint of another project in, our folder out, and the other way.

What each format means is left to its own file.
"""

import json
from pathlib import Path

import torch

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
from engine.draft.loader import check_vocabulary, load_draft, save_draft
from engine.errors import ConfigError, ModelLoadError
from engine.model.config import ModelConfig
from engine.weights.digest import folder_digest
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


def export_draft(draft: Path, model: Path, folder: Path, kind: Format, num_drafts: int) -> None:
    """Write our folder `draft`, made for the target in `model`, as a checkpoint of format `kind`.

    Raises `ConfigError` where the format cannot say what the head does.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: export to a fresh folder")
    loaded, target = load_draft(draft), ModelConfig.load(model)
    loaded.config.check_target(target, folder_digest(model))
    weights = open_weights(model)
    embedding = weights.read(_EMBEDDING).float()
    output = embedding if target.tie_word_embeddings else weights.read(_HEAD).float()
    head = loaded.build(embedding, output, 1, torch.float32, torch.device("cpu"))
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
