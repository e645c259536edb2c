"""The public surface of the engine: what `app`, `ops` and scripts may import.

Everything else in this package is the engine's own.
"""

from engine.async_engine import AsyncEngine
from engine.batch import SequenceDelta
from engine.config import EngineConfig, SpeculationConfig
from engine.detokenizer import IncrementalDetokenizer
from engine.draft.inspect import DraftFacts, inspect_draft
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
from engine.model.config import ModelConfig
from engine.near_tie import MAX_GAP, NearTies
from engine.request import FinishReason, Request, SamplingParams
from engine.runner.rates import MachineRates
from engine.runner.synthetic import shape_of
from engine.stats import EngineFacts, EngineStats
from engine.stop_strings import StopStrings
from engine.synthetic import SyntheticEngine, SyntheticWeights, WorkPart, predict_bytes
from engine.tree.profile import MeasuredProfile, scale_profile
from engine.tree.search import Profile
from engine.tree.topology import chain
from engine.weights.cache import cache_folder
from engine.weights.pull import pull
from engine.weights.source import resolve_model

__all__ = [
    "MAX_GAP",
    "AsyncEngine",
    "CapacityError",
    "ConfigError",
    "DraftFacts",
    "DraftMismatchError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineFacts",
    "EngineStats",
    "EyasError",
    "FinishReason",
    "IncrementalDetokenizer",
    "MachineRates",
    "MeasuredProfile",
    "ModelConfig",
    "ModelLoadError",
    "NearTies",
    "Profile",
    "Request",
    "RequestError",
    "SamplingParams",
    "SequenceDelta",
    "SpeculationConfig",
    "StepError",
    "StopStrings",
    "SyntheticEngine",
    "SyntheticWeights",
    "TrainingError",
    "WorkPart",
    "cache_folder",
    "chain",
    "inspect_draft",
    "predict_bytes",
    "pull",
    "resolve_model",
    "scale_profile",
    "shape_of",
]
