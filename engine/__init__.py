"""The public surface of the engine: what `app`, `ops` and scripts may import.

Everything else in this package is the engine's own.
"""

from engine.batch import SequenceDelta
from engine.config import EngineConfig, SpeculationConfig
from engine.engine import Engine
from engine.errors import (
    CapacityError,
    ConfigError,
    DraftMismatchError,
    EngineDeadError,
    EyasError,
    ModelLoadError,
    RequestError,
    StepError,
)
from engine.request import FinishReason, Request, SamplingParams
from engine.stats import EngineFacts, EngineStats

__all__ = [
    "CapacityError",
    "ConfigError",
    "DraftMismatchError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineFacts",
    "EngineStats",
    "EyasError",
    "FinishReason",
    "ModelLoadError",
    "Request",
    "RequestError",
    "SamplingParams",
    "SequenceDelta",
    "SpeculationConfig",
    "StepError",
]
