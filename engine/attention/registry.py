"""The attention backends by name. Which one a device gets by default is decided here and nowhere else."""

from collections.abc import Callable

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from engine.errors import ConfigError


def _create_triton() -> AttentionBackend:
    try:
        from engine.attention.triton import TritonAttention
    except ImportError as error:
        raise ConfigError(f"attention_backend triton needs the triton package: {error}") from error
    return TritonAttention()


def _create_xformers() -> AttentionBackend:
    try:
        from engine.attention.xformers import XformersAttention
    except ImportError as error:
        raise ConfigError(f"attention_backend xformers needs xformers 0.0.35: {error}") from error
    return XformersAttention()


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "reference": ReferenceAttention,
    "cpu": CpuAttention,
    "triton": _create_triton,
    "xformers": _create_xformers,
}
# The only device type that a backend runs on; the others run anywhere.
_DEVICES = {"cpu": "cpu", "triton": "cuda", "xformers": "cuda"}


def create_backend(name: str, device: torch.device) -> AttentionBackend:
    """Return the backend `name`; "auto" is "cpu" on a CPU, "triton" on CUDA and "reference" elsewhere.

    Raises `ConfigError` for an unknown name, a device that the backend does not run on, a missing library.
    """
    if name == "auto":
        name = {"cpu": "cpu", "cuda": "triton"}.get(device.type, "reference")
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend must be auto or one of {', '.join(BACKENDS)}, found {name!r}")
    needed = _DEVICES.get(name, device.type)
    if needed != device.type:
        raise ConfigError(
            f"attention_backend {name} runs on {needed} only, the device is {device.type}: use auto"
        )
    return BACKENDS[name]()
