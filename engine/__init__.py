"""The public surface of the engine: what `app`, `ops` and scripts may import.

Everything else in this package is the engine's own.
"""

from engine.async_engine import AsyncEngine
from engine.batch import SequenceDelta
from engine.config import EngineConfig, SpeculationConfig
from engine.detokenizer import IncrementalDetokenizer
from engine.dispatcher.explain import explain
from engine.dispatcher.latency import LatencyTable
from engine.dispatcher.state import DispatchState
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
from engine.near_tie import MAX_GAP, NearTies
from engine.request import FinishReason, Request, SamplingParams
from engine.stats import EngineFacts, EngineStats
from engine.stop_strings import StopStrings
from engine.tree.library import DEFAULT_PROFILE, TreeLibrary
from engine.tree.profile import MeasuredProfile
from engine.tree.search import Profile, acceptance_length, search
from engine.tree.topology import TreeTopology
from engine.weights.pull import pull
from engine.weights.source import resolve_model

__all__ = [
    "DEFAULT_PROFILE",
    "MAX_GAP",
    "AsyncEngine",
    "CapacityError",
    "ConfigError",
    "DispatchState",
    "DraftMismatchError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineFacts",
    "EngineStats",
    "EyasError",
    "FinishReason",
    "IncrementalDetokenizer",
    "LatencyTable",
    "MeasuredProfile",
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
    "TreeLibrary",
    "TreeTopology",
    "acceptance_length",
    "explain",
    "pull",
    "resolve_model",
    "search",
]
