"""The attention backends by name. Which one a device gets by default is decided here and nowhere else."""

from collections.abc import Callable

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from engine.errors import ConfigError

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"reference": ReferenceAttention, "cpu": CpuAttention}


def create_backend(name: str, device: torch.device) -> AttentionBackend:
    """Return the backend `name`; "auto" is "cpu" on a CPU and "reference" elsewhere. Unknown names raise
    `ConfigError`.
    """
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "reference"
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend must be auto or one of {', '.join(BACKENDS)}, found {name!r}")
    if name == "cpu" and device.type != "cpu":
        raise ConfigError(f"attention_backend cpu runs on a CPU only, the device is {device.type}: use auto")
    return BACKENDS[name]()
