"""The prefill chunks of a step as one tensor, so that one copy brings them to the device.

Which chunks run is decided by the scheduler, what becomes of them by `prefill_step`.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import DUMMY_SLOT, PrefillChunk
from engine.speculation import upload


class PrefillShape(NamedTuple):
    """The sizes that the tensors of a prefill follow from: T tokens in C chunks, both at least 1."""

    num_tokens: int
    num_chunks: int

    @staticmethod
    def of(chunks: tuple[PrefillChunk, ...]) -> "PrefillShape":
        """Return the sizes of these chunks without padding."""
        return PrefillShape(sum(len(chunk.token_ids) for chunk in chunks), len(chunks))

    @property
    def row_size(self) -> int:
        """Numbers from one row of `PackedChunks` to the next: even, since compiled kernels differ by whether
        16 divides an address.
        """
        return self.num_chunks + 2 - self.num_chunks % 2

    def pack(self, chunks: tuple[PrefillChunk, ...]) -> list[int]:
        """Return what `PackedChunks.values` holds of these chunks and padding.

        Padding is of the dummy slot and stands before position 0, where nothing is read or stored: the first
        chunk of it has all tokens that are left over, the others none.
        """
        lens = [len(chunk.token_ids) for chunk in chunks]
        num_left, num_spare = self.num_tokens - sum(lens), self.num_chunks - len(chunks)
        assert 0 <= num_left <= self.num_tokens * num_spare, (self, lens)
        rows = (
            [0, *itertools.accumulate(lens), *[self.num_tokens] * num_spare],
            [chunk.slot for chunk in chunks] + [DUMMY_SLOT] * num_spare,
            [chunk.start for chunk in chunks] + [-self.num_tokens - 1] * num_spare,
            [chunk.store_from for chunk in chunks] + [0] * num_spare,
        )
        values = [value for row in rows for value in (*row, *[0] * (self.row_size - len(row)))]
        for chunk in chunks:
            values += chunk.token_ids
            values.append(chunk.next_token_id)
        return values + [0] * (num_left + num_spare)


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """C chunks of T tokens on the device. values: int64, four rows of `row_size` and the text.

    chunk_lens holds the lengths on the host; it is None where other chunks of the same shape will follow in
    the same memory.
    """

    shape: PrefillShape
    values: Tensor
    chunk_lens: tuple[int, ...] | None

    @staticmethod
    def exact(chunks: tuple[PrefillChunk, ...], device: torch.device) -> "PackedChunks":
        """Return these chunks without padding."""
        shape = PrefillShape.of(chunks)
        lens = tuple(len(chunk.token_ids) for chunk in chunks)
        return PackedChunks(shape, upload(shape.pack(chunks), torch.int64, device), lens)

    @staticmethod
    def padded(chunks: tuple[PrefillChunk, ...], shape: PrefillShape, device: torch.device) -> "PackedChunks":
        """Return these chunks and padding, to be told apart on the device only."""
        return PackedChunks(shape, upload(shape.pack(chunks), torch.int64, device), None)

    def copy_(self, chunks: tuple[PrefillChunk, ...]) -> None:
        """Hold other chunks from now on."""
        self.values.copy_(upload(self.shape.pack(chunks), torch.int64, self.values.device))

    @property
    def cu_seqlens(self) -> Tensor:
        """[C + 1]: where each chunk begins among the tokens, and T."""
        return self.values[: self.shape.num_chunks + 1]

    @property
    def slots(self) -> Tensor:
        """[C]."""
        return self._row(1)

    @property
    def starts(self) -> Tensor:
        """[C]: the position of each chunk's first token; below 0 is padding."""
        return self._row(2)

    @property
    def store_from(self) -> Tensor:
        """[C]: from which position on K/V are stored."""
        return self._row(3)

    @property
    def text(self) -> Tensor:
        """[T + C]: the tokens of each chunk and the one after it."""
        return self.values[4 * self.shape.row_size :]

    def _row(self, idx: int) -> Tensor:
        start = idx * self.shape.row_size
        return self.values[start : start + self.shape.num_chunks]
