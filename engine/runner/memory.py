"""How many cache blocks fit. Handing them out is left to `kvcache/block_pool`."""

import torch

from engine.config import EngineConfig
from engine.draft.config import DraftConfig
from engine.errors import ConfigError
from engine.kvcache.kv_pool import KVPool
from engine.model.config import ModelConfig
from engine.tree.topology import MAX_NODES

_CUDA_SHARE = 0.85  # of the memory that is free once the weights are loaded; the rest is for activations
# Room for the widest step of all rows, its float32 logits and what warping makes of them, as far as that
# leaves most to the cache: steps that find no room are not captured, and the dispatcher goes without them.
_NUM_LOGIT_COPIES, _LEAST_CUDA_SHARE = 3, 0.7
_GIB = 1 << 30


def plan_num_blocks(
    config: EngineConfig,
    model: ModelConfig,
    draft: DraftConfig | None,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Return the number of blocks, the dummy included; each holds target and draft K/V of `block_size`
    positions.

    Raises `ConfigError` where not even two fit.
    """
    if config.num_blocks is not None:
        return config.num_blocks + 1
    num_bytes = int(config.memory_gib * _GIB)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        num_nodes = config.max_num_seqs * (1 if draft is None else MAX_NODES)
        logits = num_nodes * model.vocab_size * torch.float32.itemsize
        least, most = int(free * _LEAST_CUDA_SHARE), int(free * _CUDA_SHARE)
        num_bytes = min(max(free - _NUM_LOGIT_COPIES * logits, least), most)
    block_size = config.device_sizes(device.type == "cuda").block_size
    per_block = bytes_per_block(block_size, model, draft, dtype)
    num_blocks = num_bytes // per_block
    if num_blocks < 2:
        raise ConfigError(
            f"the cache needs at least {2 * per_block / _GIB:.2f} GiB, found {num_bytes / _GIB:.2f}: "
            + ("use a device with more memory" if device.type == "cuda" else "raise memory_gib")
        )
    return num_blocks


def bytes_per_block(
    block_size: int, model: ModelConfig, draft: DraftConfig | None, dtype: torch.dtype
) -> int:
    """Return the bytes of one block over both networks."""
    total = KVPool.bytes_per_block(model.num_layers, block_size, model.num_kv_heads, model.head_dim, dtype)
    if draft is not None:
        total += KVPool.bytes_per_block(
            draft.num_layers, block_size, draft.num_kv_heads, draft.head_dim, dtype
        )
    return total
