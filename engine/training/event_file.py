"""Scalars in TensorBoard's event file format: TFRecord framing around Event messages, written by hand.

What is logged is left to `train_log`; a reader is whatever TensorBoard the user has.
"""

import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reflected
_MASK_DELTA = 0xA282EAD8


class EventFile:
    """One event file in `folder`. Each `write` is flushed, so a killed run keeps what it logged."""

    def __init__(self, folder: Path) -> None:
        seconds = time.time()
        self._file: BinaryIO = (folder / f"events.out.tfevents.{int(seconds)}.eyas").open("ab")
        self._write(_double(1, seconds) + _bytes(3, b"brain.Event:2"))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one event with all `scalars` of `step`."""
        values = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in scalars.items()
        )
        self._write(_double(1, time.time()) + _varint_field(2, step) + _bytes(5, values))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_crc(length) + event + _masked_crc(event))
        self._file.flush()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data`."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)
