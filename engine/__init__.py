"""The public surface of the engine: what `app`, `ops` and scripts may import.

Everything else in this package is the engine's own.
"""

from engine.async_engine import AsyncEngine
from engine.batch import SequenceDelta
from engine.config import EngineConfig, SpeculationConfig
from engine.detokenizer import IncrementalDetokenizer
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
    TrainingError,
)
from engine.near_tie import MAX_GAP, NearTies
from engine.request import FinishReason, Request, SamplingParams
from engine.stats import EngineFacts, EngineStats
from engine.stop_strings import StopStrings
from engine.weights.pull import pull
from engine.weights.source import resolve_model

__all__ = [
    "MAX_GAP",
    "AsyncEngine",
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
    "IncrementalDetokenizer",
    "ModelLoadError",
    "NearTies",
    "Request",
    "RequestError",
    "SamplingParams",
    "SequenceDelta",
    "SpeculationConfig",
    "StepError",
    "StopStrings",
    "TrainingError",
    "pull",
    "resolve_model",
]
