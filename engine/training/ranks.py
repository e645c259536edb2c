"""The place of this process among those that train one head together.

Starting the processes and their group is left to the caller: `torchrun`, Ray Train, or nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ranks:
    """`index` of `count` processes, each with a copy of target and head. One process alone is the usual
    case.
    """

    index: int = 0
    count: int = 1

    @staticmethod
    def current() -> "Ranks":
        """Return the place in torch's default process group; alone where none was started."""
        if not dist.is_available() or not dist.is_initialized():
            return Ranks()
        return Ranks(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        """True in the process that writes files and the log."""
        return self.index == 0

    def share(self, rows: Tensor) -> Tensor:
        """Return this process's part of `rows` [R]; all parts are equally long."""
        return rows.chunk(self.count)[self.index]

    def check_batch(self, batch_rows: int) -> None:
        """Raise `ConfigError` where a batch cannot be cut into equal parts."""
        if batch_rows % self.count != 0:
            raise ConfigError(
                f"batch_rows must be a multiple of the {self.count} processes that share a batch, "
                f"found {batch_rows}"
            )

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum `tensors` of one dtype over all processes, in place, as one message."""
        if self.count == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def wait(self) -> None:
        """Return once every process has come here."""
        if self.count > 1:
            dist.barrier()


ALONE = Ranks()
