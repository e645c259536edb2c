"""Content digests of files and of model folders.

What a digest is compared with is left to the caller: a draft names the digest of its target.
"""

import hashlib
import json
from pathlib import Path

from engine.errors import ModelLoadError
from engine.weights.json_object import read_json_object
from engine.weights.shards import weight_files

MANIFEST = "manifest.json"

# The keys of config.json that change what the network computes, in both spellings of the rotary settings.
_NETWORK_KEYS = (
    "architectures",
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
)


def file_digest(path: Path) -> str:
    """Return the sha256 of a file as hex. Streams: about 0.3 s per 100 MB."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error


def folder_digest(folder: Path) -> str:
    """Return one sha256 over the network settings and the weight files of a model folder.

    Tokenizer, chat template and generation settings do not enter it, and keys that are null count as absent.
    It costs one read of the weights. Raises `ModelLoadError` where a pulled model is not what was pulled.
    """
    config = read_json_object(folder / "config.json")
    settings = {key: config[key] for key in _NETWORK_KEYS if config.get(key) is not None}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    pulled = _pulled_digests(folder)
    for path in weight_files(folder):
        found = file_digest(path)
        if pulled.get(path.name, found) != found:
            raise ModelLoadError(
                f"{path} is damaged: its content is not what was pulled; run eyas pull again"
            )
        digest.update(f"\n{path.name} {found}".encode())
    return digest.hexdigest()


def _pulled_digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file as the manifest of a pulled model has it; nothing for other folders."""
    if not (folder / MANIFEST).is_file():
        return {}
    manifest = read_json_object(folder / MANIFEST)
    if "source_sha256" not in manifest:  # not one that a pull wrote
        return {}
    return {name: file["sha256"] for name, file in manifest["files"].items()}
