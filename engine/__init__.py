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
from engine.draft.inspect import DraftFacts, inspect_draft
from engine.draft_status import NO_DRAFT, DraftState, DraftStatus
from engine.engine import Engine
from engine.environment import enter_core_environment
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
from engine.grammar.compiler import GrammarCompiler
from engine.guidance import Grammar
from engine.logprobs import TokenLogprob, WantedLogprobs
from engine.model.config import ModelConfig
from engine.near_tie import MAX_GAP, NearTies
from engine.precision import PrecisionConfig
from engine.request import FinishReason, Request, SamplingParams
from engine.runner.preflight import check_config
from engine.runner.rates import MachineRates
from engine.runner.synthetic import shape_of
from engine.stats import STEP_SECONDS, EngineFacts, EngineStats
from engine.stop_strings import StopStrings
from engine.synthetic import SyntheticEngine, SyntheticWeights, WorkPart, predict_bytes
from engine.tree.library import DEFAULT_PROFILE, TreeLibrary
from engine.tree.profile import MeasuredProfile, scale_profile
from engine.tree.search import Profile, acceptance_length, search
from engine.tree.topology import TreeTopology, chain
from engine.weights.cache import cache_folder
from engine.weights.pull import pull
from engine.weights.source import resolve_model

__all__ = [
    "DEFAULT_PROFILE",
    "MAX_GAP",
    "NO_DRAFT",
    "STEP_SECONDS",
    "AsyncEngine",
    "CapacityError",
    "ConfigError",
    "DispatchState",
    "DraftFacts",
    "DraftMismatchError",
    "DraftState",
    "DraftStatus",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineFacts",
    "EngineStats",
    "EyasError",
    "FinishReason",
    "Grammar",
    "GrammarCompiler",
    "IncrementalDetokenizer",
    "LatencyTable",
    "MachineRates",
    "MeasuredProfile",
    "ModelConfig",
    "ModelLoadError",
    "NearTies",
    "PrecisionConfig",
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
    "TokenLogprob",
    "WantedLogprobs",
    "TrainingError",
    "TreeLibrary",
    "TreeTopology",
    "WorkPart",
    "acceptance_length",
    "cache_folder",
    "chain",
    "check_config",
    "enter_core_environment",
    "explain",
    "inspect_draft",
    "predict_bytes",
    "pull",
    "resolve_model",
    "scale_profile",
    "search",
    "shape_of",
]
