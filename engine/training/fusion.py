"""Fusion of elementwise work on CUDA by `torch.compile`, at first use.

What is worth fusing is left to the callers, which run the same function eagerly elsewhere.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


def fused(function: Function, device: torch.device) -> Function:
    """Return `function`, compiled for fixed shapes where `device` is CUDA."""
    return _compile(function) if device.type == "cuda" else function


@functools.cache
def _compile(function: Function) -> Function:
    # Not at import: the compiler's own import takes seconds, and the CPU never needs it.
    compiled: Function = torch.compile(function, dynamic=False)  # type: ignore[assignment]
    return compiled
