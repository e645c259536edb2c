"""Judging where two greedy answers part: was it a near-tie, or a fault?

In 16 bits a batched sum may flip two tokens whose logits nearly tie; float32 logits of the same text say how
near.
"""

from pathlib import Path

import torch
from torch import Tensor

from engine.attention.backend import AttentionLayout
from engine.attention.registry import create_backend
from engine.layers.rotary import Angles, rotate_qkv
from engine.model.config import ModelConfig
from engine.runner.worker import load_target

# Logits of 16 to 32 have steps of 0.125 in bfloat16, and a forward adds the rounding of every layer to that.
MAX_GAP = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}


class NearTies:
    """The target in float32 on the CPU, asked about single positions; loading it costs seconds."""

    def __init__(self, folder: Path) -> None:
        config = ModelConfig.load(folder)
        self._device = torch.device("cpu")
        self._target = load_target(folder, config, (), config.max_position, torch.float32, self._device)
        self._backend = create_backend("auto", self._device)
        self._no_pages = torch.zeros(1, 1, config.num_kv_heads, config.head_dim)

    @torch.inference_mode()
    def gap(self, tokens: tuple[int, ...], left: int, right: int) -> float:
        """Return how far the worse of two next tokens is below the best one after `tokens`, in float32
        logits.
        """
        size = len(tokens)
        window = torch.zeros(1, size, dtype=torch.int64)
        causal = torch.ones(1, size, size, dtype=torch.bool).tril()
        layout = AttentionLayout(torch.zeros(1, 0, dtype=torch.int64), window, window, causal)
        num_kv_heads = self._target.config.num_kv_heads
        attend_pages = self._backend.bind(layout, 1)

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            del layer_idx  # nothing is cached, so every layer attends alike
            q, k, v = rotate_qkv(qkv, angles, num_kv_heads)
            return attend_pages(q[None], k[None], v[None], self._no_pages, self._no_pages)[0]

        output = self._target(torch.tensor(tokens), torch.arange(size), attend)
        logits = self._target.logits(output.hidden[-1])
        return float(logits.max() - torch.minimum(logits[left], logits[right]))
