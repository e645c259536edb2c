"""What the operator asks of an engine: frozen, checked at construction.

What the machine answered (the dtype picked, the number of blocks that fit) is another type, `EngineFacts`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from engine.errors import ConfigError

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DraftMode = Literal["greedy", "sampled"]
TreeTable = tuple[tuple[int, str], ...]

# What pays, as measured: on a CPU a step of several rows is bound by its products, on an H200 hardly.
CPU_TABLE: TreeTable = ((1, "tree-8"), (2, "chain-3"), (4, "chain-2"))
CUDA_TABLE: TreeTable = ((16, "tree-8"), (64, "chain-3"))


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Which trees the engine may draft, and how children are chosen.

    `mode` is "auto" (the dispatcher picks by costs measured at the start and live acceptance, or by `table`
    where one is given), "table", "off", or one tree name for every step. `table` is the static choice:
    (largest batch, tree name) in rising batch order; a batch beyond the last entry decodes plainly. In mode
    "table" None is that of the device. `max_step_seconds` bars trees whose steps are expected to last longer.
    `draft_mode` "greedy" takes the top children (output identical to plain decoding for a seed); "sampled"
    draws them without replacement (the output law is identical, single tokens are not).
    """

    mode: str = "auto"
    table: TreeTable | None = None
    draft_mode: DraftMode = "greedy"
    feature_window: int = 16
    max_step_seconds: float | None = None

    def __post_init__(self) -> None:
        batches = [batch for batch, _ in self.table or ()]
        if batches != sorted(set(batches)) or any(batch < 1 for batch in batches):
            raise ConfigError(f"speculation.table needs rising batch sizes from 1, found {batches}")
        if self.draft_mode not in ("greedy", "sampled"):
            raise ConfigError(f"speculation.draft_mode must be greedy or sampled, found {self.draft_mode!r}")
        if self.max_step_seconds is not None and not self.max_step_seconds > 0:
            raise ConfigError(f"speculation.max_step_seconds must be positive, found {self.max_step_seconds}")
        if self.feature_window < 2:
            raise ConfigError(f"speculation.feature_window must be at least 2, found {self.feature_window}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to start. Sizes are in tokens unless named blocks.

    `num_blocks` None means: as many as `memory_gib` (CPU) or the free device memory (CUDA) hold.
    `hang_seconds` is how long a core with work may say nothing before it counts as hanging. It speaks after
    every step, and the longest ones must fit: 512 prompt tokens of a large model on a slow CPU, or the first
    step on a GPU, which compiles its kernels, take a minute.
    `block_size` and `max_batched_tokens` (the tokens of one step, prompts and trees) None mean what suits the
    device: see `device_sizes`. `num_threads` None means cores - 1, at least 1: two spinning threads on two
    busy cores are slower than one.
    """

    model: Path
    draft: Path | None = None
    dtype: DTypeName = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: str = "auto"
    block_size: int | None = None
    num_blocks: int | None = None
    memory_gib: float = 1.0
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_waiting: int = 1024
    max_batched_tokens: int | None = None
    enable_prefix_cache: bool = True
    num_threads: int | None = None
    seed: int = 0
    hang_seconds: float = 120.0
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        for name in ("block_size", "num_blocks", "max_batched_tokens", "max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1 or unset, found {value}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype must be auto, float32, bfloat16 or float16, found {self.dtype!r}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device must be auto, cpu or cuda, found {self.device!r}")
        if not self.hang_seconds > 0:
            raise ConfigError(f"hang_seconds must be positive, found {self.hang_seconds}")
        if self.memory_gib <= 0:
            raise ConfigError(f"memory_gib must be positive, found {self.memory_gib}")

    def device_sizes(self, is_cuda: bool) -> "DeviceSizes":
        """Return what is asked for, else what suits the device: a GPU reads pages in tiles of 64 positions
        and a few thousand tokens fill it; on a CPU every piece of a prompt holds up the rows that decode.
        """
        table = self.speculation.table
        return DeviceSizes(
            block_size=self.block_size or (64 if is_cuda else 16),
            max_batched_tokens=self.max_batched_tokens or (8192 if is_cuda else 512),
            table=table if table is not None else CUDA_TABLE if is_cuda else CPU_TABLE,
        )


class DeviceSizes(NamedTuple):
    """The part of `EngineConfig` that a device has a say in."""

    block_size: int
    max_batched_tokens: int
    table: TreeTable
