"""What the machine answers before a model is loaded: device, dtype and thread count.

Sizing the cache is left to `memory`.
"""

import functools
import os
import time

import torch
import torch.nn.functional as F

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.linear import PackedLinear, can_pack
from engine.model.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NUM_TIMED_TOKENS = (1, 8)  # plain decoding and a small tree
_NUM_ROUNDS = 5


def choose_device(config: EngineConfig) -> torch.device:
    """Return the device asked for; "auto" takes CUDA where there is one."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device: use device cpu or auto")
    is_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if is_cuda else "cpu")


def choose_num_threads(config: EngineConfig) -> int:
    """Return the intra-op threads: cores - 1 by default, since two threads on two busy cores spin at each
    barrier.
    """
    return config.num_threads or max(1, (os.cpu_count() or 2) - 1)


def choose_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype asked for; "auto" is bfloat16 on CUDA, and on a CPU whichever multiplies faster there.

    Times the MLP shapes of `model` in float32 and bfloat16 for a few milliseconds.
    """
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cuda":
        return torch.bfloat16
    seconds = {dtype: _time_matmul(model, dtype) for dtype in (torch.float32, torch.bfloat16)}
    return min(seconds, key=seconds.__getitem__)


@torch.inference_mode()
def _time_matmul(model: ModelConfig, dtype: torch.dtype) -> float:
    """Return the best time of one MLP up-projection for one token and for a small tree, summed."""
    weight = torch.full((2 * model.intermediate_size, model.hidden_size), 0.5, dtype=dtype)
    is_packed = can_pack(weight.device, dtype)
    multiply = PackedLinear(weight).forward if is_packed else functools.partial(F.linear, weight=weight)
    total = 0.0
    for num_tokens in _NUM_TIMED_TOKENS:
        x = torch.full((num_tokens, model.hidden_size), 0.5, dtype=dtype)
        rounds = []
        for _ in range(_NUM_ROUNDS):
            start = time.perf_counter()
            for _ in range(4):
                multiply(x)
            rounds.append(time.perf_counter() - start)
        total += min(rounds)
    return total
