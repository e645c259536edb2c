"""What a measurement ran on, for the head of every report.

Measuring is left to `bench` and `evaluation`.
"""

import importlib.metadata
import platform
from pathlib import Path

import torch

from app.version import version
from engine import EngineFacts


def describe_machine(facts: EngineFacts) -> dict[str, str | int | None]:
    """Return the hardware, libraries and model of an engine as plain names and values."""
    return {
        "cpu": cpu_name(Path("/proc/cpuinfo")),
        "device": facts.device,
        "gpu": torch.cuda.get_device_name(facts.device) if facts.device.startswith("cuda") else None,
        "threads": facts.num_threads,
        "dtype": facts.dtype,
        "attention_backend": facts.attention_backend,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "eyas": version(),
        "model": facts.model_name,
        "model_digest": facts.model_digest,
        "draft_digest": facts.draft_digest,
    }


def cpu_name(cpu_info: Path) -> str:
    """Return the processor's name as Linux gives it, else what Python knows."""
    if cpu_info.is_file():
        for line in cpu_info.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
