"""The token store of draft training: shards of conversations on disk, and their packing into rows.

Making conversations is left to whoever calls `ShardWriter.add`; training on them to `trainer`.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.weights.safetensors import SafetensorsFile, write_safetensors

_SHARD_PATTERN = "shard-*.safetensors"
_TENSOR_NAMES = frozenset({"token_ids", "is_answer", "lengths"})
_KEY_BUCKETS = 10_000


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations end to end. token_ids: [T] int32; is_answer: [T] bool marks tokens the target wrote as
    an answer; lengths: [C] int64, of sum T.
    """

    token_ids: Tensor
    is_answer: Tensor
    lengths: Tensor

    @property
    def num_conversations(self) -> int:
        return self.lengths.shape[0]

    @property
    def starts(self) -> Tensor:
        """Index of the first token of each conversation, [C] int64."""
        return self.lengths.cumsum(0) - self.lengths

    def select(self, chosen: Tensor) -> "Conversations":
        """Return the conversations where `chosen` [C] bool holds, in their order."""
        keep = chosen.repeat_interleave(self.lengths)
        return Conversations(self.token_ids[keep], self.is_answer[keep], self.lengths[chosen])

    def clip(self, max_length: int) -> "Conversations":
        """Return the first `max_length` tokens of each conversation."""
        offsets = torch.arange(self.token_ids.shape[0]) - self.starts.repeat_interleave(self.lengths)
        keep = offsets < max_length
        return Conversations(self.token_ids[keep], self.is_answer[keep], self.lengths.clamp(max=max_length))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (token_ids, is_answer) of each conversation."""
        lengths = self.lengths.tolist()
        parts = (torch.split(self.token_ids, lengths), torch.split(self.is_answer, lengths))
        yield from zip(*parts, strict=True)


class ShardWriter:
    """Appends conversations to a folder; a shard appears whole or not at all.

    A writer on a folder that already holds shards goes on after them, so an interrupted run loses at most the
    conversations of its unwritten shard. Use as a context manager: leaving it without an error writes what is
    buffered.
    """

    def __init__(self, folder: Path, shard_size: int = 1 << 22) -> None:
        self.folder = folder
        self.shard_size = shard_size
        folder.mkdir(parents=True, exist_ok=True)
        paths = shard_paths(folder)
        self._next_idx = int(paths[-1].stem.removeprefix("shard-")) + 1 if paths else 0
        self._buffer: list[tuple[Tensor, Tensor]] = []
        self._num_buffered = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *exc_info: object) -> None:
        if error_type is None:
            self.flush()

    def add(self, token_ids: Tensor, is_answer: Tensor) -> None:
        """Append one conversation: token_ids [n] of any integer type, is_answer [n] bool."""
        assert token_ids.shape == is_answer.shape, (token_ids.shape, is_answer.shape)
        assert token_ids.numel() > 0, "a conversation holds at least one token"
        self._buffer.append((token_ids.to(torch.int32), is_answer.bool()))
        self._num_buffered += token_ids.numel()
        if self._num_buffered >= self.shard_size:
            self.flush()

    def flush(self) -> None:
        """Write the buffered conversations as a shard of their own."""
        if self._buffer:
            write_shard(shard_path(self.folder, self._next_idx), self._buffer)
            self._next_idx += 1
            self._buffer, self._num_buffered = [], 0


def write_shard(path: Path, conversations: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write conversations (token_ids [n] int32, is_answer [n] bool) as one file, whole or not at all."""
    token_ids, is_answer = zip(*conversations, strict=True)
    tensors = {
        "token_ids": torch.cat(token_ids),
        "is_answer": torch.cat(is_answer),
        "lengths": torch.tensor([ids.numel() for ids in token_ids]),
    }
    write_safetensors(path, tensors)


def shard_path(folder: Path, shard_idx: int) -> Path:
    """Return the place of a shard."""
    return folder / f"shard-{shard_idx:08d}.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    """Return the shards of `folder` in the order they were written."""
    return sorted(folder.glob(_SHARD_PATTERN))


def load_conversations(folder: Path) -> Conversations:
    """Read every shard of `folder`; raises `ModelLoadError` where there is none or one is damaged."""
    paths = shard_paths(folder)
    if not paths:
        raise ModelLoadError(f"{folder} holds no {_SHARD_PATTERN}: generate training data first")
    parts = [_read_shard(path) for path in paths]
    return Conversations(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.is_answer for part in parts]),
        torch.cat([part.lengths for part in parts]),
    )


def _read_shard(path: Path) -> Conversations:
    file = SafetensorsFile(path)
    if file.names() != _TENSOR_NAMES:
        raise ModelLoadError(f"{path} must hold {sorted(_TENSOR_NAMES)}, found {sorted(file.names())}")
    part = Conversations(file.read("token_ids"), file.read("is_answer"), file.read("lengths"))
    if not part.token_ids.shape == part.is_answer.shape == (int(part.lengths.sum()),):
        raise ModelLoadError(f"{path}: the lengths of its conversations do not add up to its tokens")
    return part


def split_held_out(conversations: Conversations, share: float) -> tuple[Conversations, Conversations]:
    """Return (train, held out), where about `share` of the conversations are held out.

    The side depends on a conversation's tokens alone, so equal conversations never lie on both sides, and
    data added later moves none.
    """
    is_held_out = content_keys(conversations) % _KEY_BUCKETS < round(share * _KEY_BUCKETS)
    return conversations.select(~is_held_out), conversations.select(is_held_out)


def content_keys(conversations: Conversations) -> Tensor:
    """Return a hash of each conversation's tokens, [C] int64 of 0 or more; exact wrap-around arithmetic."""
    position = torch.arange(conversations.token_ids.shape[0])
    position -= conversations.starts.repeat_interleave(conversations.lengths)
    mixed = _mix(conversations.token_ids.long() + (position << 32))
    owner = torch.arange(conversations.num_conversations).repeat_interleave(conversations.lengths)
    sums = torch.zeros(conversations.num_conversations, dtype=torch.int64).index_add_(0, owner, mixed)
    return _mix(sums) & (2**63 - 1)


def _mix(values: Tensor) -> Tensor:
    """Scramble int64 values (the finalizer of splitmix64; the shifts bring in sign bits, which is
    harmless).
    """
    values = (values ^ (values >> 30)) * -4658895280553007687
    values = (values ^ (values >> 27)) * -7723592293110705685
    return values ^ (values >> 31)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of `row_length` tokens, each a run of whole documents and then padding.

    token_ids: [R, L] int32, is_answer: [R, L] bool, positions: [R, L] int32 counts from 0 in each document
    and again in the padding, which is a document of its own that no loss sees.
    """

    token_ids: Tensor
    is_answer: Tensor
    positions: Tensor

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def row_length(self) -> int:
        return self.token_ids.shape[1]


def pack(conversations: Conversations, row_length: int) -> PackedRows:
    """Place conversations into rows, best fit in falling length; one longer than a row loses its end."""
    kept = conversations.lengths.clamp(max=row_length)
    starts, num_rows = _best_fit(kept.tolist(), row_length)
    total = int(kept.sum())
    offsets = torch.arange(total) - (kept.cumsum(0) - kept).repeat_interleave(kept)
    source = conversations.starts.repeat_interleave(kept) + offsets
    place = torch.tensor(starts).repeat_interleave(kept) + offsets
    token_ids = torch.zeros(num_rows * row_length, dtype=torch.int32)
    is_answer = torch.zeros(num_rows * row_length, dtype=torch.bool)
    positions = torch.full((num_rows * row_length,), -1, dtype=torch.int32)
    token_ids[place] = conversations.token_ids[source]
    is_answer[place] = conversations.is_answer[source]
    positions[place] = offsets.int()
    positions = positions.view(num_rows, row_length)
    used = (positions >= 0).sum(1, keepdim=True)
    padding = torch.arange(row_length, dtype=torch.int32) - used.int()
    positions = torch.where(positions < 0, padding, positions)
    return PackedRows(token_ids.view(num_rows, row_length), is_answer.view(num_rows, row_length), positions)


def _best_fit(lengths: list[int], row_length: int) -> tuple[list[int], int]:
    """Return the flat start of every document, and the number of rows."""
    rows_by_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    rooms: list[int] = []  # the sizes of room that some row has, rising
    starts = [0] * len(lengths)
    num_rows = 0
    for document in sorted(range(len(lengths)), key=lambda idx: -lengths[idx]):
        length = lengths[document]
        idx = bisect.bisect_left(rooms, length)
        if idx < len(rooms):
            room = rooms[idx]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rooms[idx]
        else:
            room, row = row_length, num_rows
            num_rows += 1
        starts[document] = row * row_length + row_length - room
        left = room - length
        if not rows_by_room[left]:
            bisect.insort(rooms, left)
        rows_by_room[left].append(row)
    return starts, num_rows


def batch_indices(num_rows: int, batch_rows: int, seed: int, step: int) -> Tensor:
    """Return the rows [batch_rows] int64 of a training step: every epoch is a fresh order of all rows.

    A pure function of its arguments, so a resumed run sees the batches that an uninterrupted one would.
    """
    per_epoch = num_rows // batch_rows
    assert per_epoch > 0, f"{num_rows} rows do not fill a batch of {batch_rows}"
    generator = torch.Generator().manual_seed(seed + step // per_epoch)
    order = torch.randperm(num_rows, generator=generator)
    start = step % per_epoch * batch_rows
    return order[start : start + batch_rows]
