"""The weights of a folder as one source of named tensors, in a single file or in the shards of an index.

The format of a file is left to `safetensors`, the use of the tensors to `loader`.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from engine.errors import ModelLoadError
from engine.weights.json_object import read_json_object
from engine.weights.safetensors import SafetensorsFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"[\w.-]+\.safetensors")


class TensorSource(Protocol):
    """Named tensors that are read one at a time."""

    def names(self) -> frozenset[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str) -> Tensor: ...


class SafetensorsShards:
    """Several files, each holding some of the tensors."""

    def __init__(self, files: Mapping[str, SafetensorsFile]) -> None:
        self._files = files  # by tensor name

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].shape(name)

    def read(self, name: str) -> Tensor:
        return self._files[name].read(name)


def open_weights(folder: Path) -> TensorSource:
    """Open the safetensors weights of a model folder, a single file before a sharded one.

    Every header is checked, and an index must agree with its shards in both directions. Raises
    `ModelLoadError` where it does not, or where the folder holds no safetensors weights.
    """
    if (folder / SINGLE_FILE).is_file():
        return SafetensorsFile(folder / SINGLE_FILE)
    weight_map = _read_index(folder)
    files = {file_name: SafetensorsFile(folder / file_name) for file_name in sorted(set(weight_map.values()))}
    for file_name, file in files.items():
        listed = frozenset(name for name, owner in weight_map.items() if owner == file_name)
        _require_none(listed - file.names(), f"{file.path} lacks tensors that {INDEX_FILE} places there")
        _require_none(
            file.names() - listed, f"{file.path} holds tensors that {INDEX_FILE} does not place there"
        )
    return SafetensorsShards({name: files[file_name] for name, file_name in weight_map.items()})


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a model folder, in name order."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    return [folder / file_name for file_name in sorted(set(_read_index(folder).values()))]


def list_names(names: Iterable[str]) -> str:
    """Return up to five of `names` in order, and how many more there are, for an error message."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return ", ".join(ordered[:5]) + more


def _require_none(names: frozenset[str], complaint: str) -> None:
    if names:
        raise ModelLoadError(f"{complaint}: {list_names(names)}")


def _read_index(folder: Path) -> dict[str, str]:
    """Return the shard of every tensor; a shard is a plain file name, so nothing outside `folder` is read."""
    path = folder / INDEX_FILE
    if not path.is_file():
        raise ModelLoadError(
            f"{folder} must hold {SINGLE_FILE} or {INDEX_FILE}: weights are read as safetensors only"
        )
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path} must hold a weight_map with the file of every tensor")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _SHARD_NAME.fullmatch(file_name):
            raise ModelLoadError(f"{path}: tensor {name!r} needs a plain file name, found {file_name!r}")
    return weight_map
