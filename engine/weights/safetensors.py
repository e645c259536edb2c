"""Reader and writer of the safetensors format: header length, JSON header, raw little-endian data.

Which tensors a network needs is left to `mapping`, and moving them into a module to `loader`.
"""

import ctypes
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from engine.errors import ModelLoadError

MAX_HEADER_SIZE = 100_000_000  # bytes; the limit of the format's own library
_PREFIX_SIZE = 8
_METADATA_KEY = "__metadata__"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: bytes [start, end) of the data section."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One opened file. Only the header is read at once; the data is mapped, and paged in where it is used.

    The whole header is checked against the file's size, so a truncated or corrupt file raises
    `ModelLoadError` here and never later.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header_size = int.from_bytes(file.read(_PREFIX_SIZE), "little")
                if size < _PREFIX_SIZE or header_size > min(MAX_HEADER_SIZE, size - _PREFIX_SIZE):
                    raise ModelLoadError(
                        f"{path} is truncated or no safetensors file: {size} bytes do not hold a header of "
                        f"{header_size} bytes"
                    )
                header = _parse_header(path, file.read(header_size))
        except OSError as error:
            raise ModelLoadError(f"cannot read weights file {path}: {error}") from error
        self._data_start = _PREFIX_SIZE + header_size
        self.metadata = _read_metadata(path, header.pop(_METADATA_KEY, {}))
        self.entries = {name: _read_entry(path, name, raw) for name, raw in header.items()}
        _check_layout(path, self.entries, size - self._data_start)
        # A private mapping: the tensors handed out keep it alive, and writes to them never reach the file.
        self._bytes = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)

    def names(self) -> frozenset[str]:
        """Return the names of the tensors in the file."""
        return frozenset(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name` without reading its data."""
        return self.entries[name].shape

    def read(self, name: str) -> Tensor:
        """Return tensor `name` on the CPU in its stored dtype, as a view of the mapped file where aligned."""
        entry = self.entries[name]
        data = self._bytes[self._data_start + entry.start : self._data_start + entry.end]
        if data.numel() == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if data.storage_offset() % entry.dtype.itemsize != 0:
            data = data.clone()
        return data.view(entry.dtype).view(entry.shape)


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write `tensors` to `path` atomically: readers see the old file or the whole new one.

    The bytes depend only on the arguments. Tensors may live on any device; one at a time is brought to the
    CPU. An `OSError` (for instance a full disk) passes through, and the temporary file is removed.
    """
    # Wide dtypes first, so that every tensor is aligned to its own item size.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header = _build_header(order, tensors, metadata or {})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(len(header).to_bytes(_PREFIX_SIZE, "little"))
            file.write(header)
            for name in order:
                _write_data(file, tensors[name])
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _build_header(order: list[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {_METADATA_KEY: dict(sorted(metadata.items()))} if metadata else {}
    start = 0
    for name in order:
        tensor = tensors[name]
        end = start + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return encoded.ljust(-(-len(encoded) // _PREFIX_SIZE) * _PREFIX_SIZE)


def _write_data(file: BinaryIO, tensor: Tensor) -> None:
    """Write the data of `tensor` as it lies in memory, without going through numpy."""
    cpu = tensor.detach().to("cpu").contiguous()
    size = cpu.numel() * cpu.dtype.itemsize
    if size > 0:
        file.write((ctypes.c_char * size).from_address(cpu.data_ptr()))


def _parse_header(path: Path, encoded: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        header = json.loads(encoded.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} has a corrupt header: {error}") from error
    if not isinstance(header, dict):
        raise ModelLoadError(f"{path} has a corrupt header: expected a JSON object, found {header!r}")
    return header


def _read_metadata(path: Path, raw: Any) -> dict[str, str]:
    if not isinstance(raw, dict) or any(not isinstance(value, str) for value in raw.values()):
        raise ModelLoadError(f"{path} has corrupt metadata: expected strings by name, found {raw!r}")
    return raw


def _read_entry(path: Path, name: str, raw: Any) -> TensorEntry:
    match raw:
        case {"dtype": str(dtype_name), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            raise ModelLoadError(f"{path}: tensor {name!r} has a corrupt entry {raw!r}")
    if any(type(length) is not int or length < 0 for length in shape):
        raise ModelLoadError(f"{path}: tensor {name!r} has a corrupt shape {shape!r}")
    if dtype_name not in _DTYPES:
        raise ModelLoadError(
            f"{path}: tensor {name!r} has dtype {dtype_name!r}, expected one of {[*_DTYPES]}"
        )
    dtype = _DTYPES[dtype_name]
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ModelLoadError(
            f"{path}: tensor {name!r} of shape {shape} and dtype {dtype_name} cannot take {end - start} bytes"
        )
    return TensorEntry(dtype, tuple(shape), start, end)


def _check_layout(path: Path, entries: Mapping[str, TensorEntry], data_size: int) -> None:
    """Check that the tensors cover the data section without a gap or an overlap."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise ModelLoadError(
                f"{path}: tensor {name!r} must start at byte {position} of the data, found {entry.start}: "
                "tensors may neither overlap nor leave gaps"
            )
        position = entry.end
    if position != data_size:
        raise ModelLoadError(
            f"{path} must hold {position} bytes of data, found {data_size}: is it truncated?"
        )
