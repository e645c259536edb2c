"""What the operator asks of a server: one YAML file, command-line flags over it, checked at the edge.

The engine's own sizes are checked by `EngineConfig`, which this builds.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from app.drafts import AUTO_DRAFT, draft_folder
from app.message_pace import MESSAGES_PER_SECOND
from app.version import version
from engine import ConfigError, EngineConfig, PrecisionConfig, SpeculationConfig, resolve_model
from ops.tracing.context import TraceSource
from ops.tracing.export import SpanExport, check_export, open_export

DEFAULT_MODEL = "smollm2"

_SPECULATION = SpeculationConfig()
_PRECISION = PrecisionConfig()
_ENGINE = EngineConfig(model=Path())


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SpeculationSection(_Section):
    """Mirrors `SpeculationConfig`."""

    mode: str = _SPECULATION.mode
    table: tuple[tuple[int, str], ...] | None = _SPECULATION.table
    draft_mode: Literal["greedy", "sampled"] = _SPECULATION.draft_mode
    feature_window: int = _SPECULATION.feature_window
    max_step_seconds: float | None = _SPECULATION.max_step_seconds


class PrecisionSection(_Section):
    """Mirrors `PrecisionConfig`."""

    target: Literal["model", "fp8"] = _PRECISION.target
    draft: Literal["model", "int4-ffn"] = _PRECISION.draft
    cache: Literal["model", "fp8"] = _PRECISION.cache


class EngineSection(_Section):
    """Mirrors `EngineConfig`, whose `model` and `draft` stand at the top level."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _ENGINE.dtype
    device: Literal["auto", "cpu", "cuda"] = _ENGINE.device
    attention_backend: str = _ENGINE.attention_backend
    block_size: int | None = _ENGINE.block_size
    num_blocks: int | None = _ENGINE.num_blocks
    memory_gib: float = _ENGINE.memory_gib
    max_model_len: int | None = _ENGINE.max_model_len
    max_num_seqs: int = _ENGINE.max_num_seqs
    max_num_waiting: int = _ENGINE.max_num_waiting
    max_batched_tokens: int | None = _ENGINE.max_batched_tokens
    enable_prefix_cache: bool = _ENGINE.enable_prefix_cache
    num_threads: int | None = _ENGINE.num_threads
    seed: int = _ENGINE.seed
    hang_seconds: float = _ENGINE.hang_seconds
    speculation: SpeculationSection = SpeculationSection()
    precision: PrecisionSection = PrecisionSection()


class AutoscalingSection(_Section):
    """Replicas between `min_replicas` and `max_replicas`; without the latter there are `num_replicas`.

    `time_per_token_s` is the objective that a replica's capacity is counted by, also for routing. The other
    keys are those of `autoscaling.ScalingRule`.
    """

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int | None = Field(default=None, ge=1)
    time_per_token_s: float = Field(default=0.05, gt=0)
    up_use: float = Field(default=0.85, gt=0, le=1)
    down_use: float = Field(default=0.6, gt=0, le=1)
    max_waiting_tokens: float = Field(default=8192.0, gt=0)
    downscale_after_s: float = Field(default=300.0, ge=0)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas must be at least min_replicas, {self.min_replicas}")
        if self.down_use >= self.up_use:
            raise ValueError(f"down_use must be below up_use, {self.up_use}")
        return self


class TracingSection(_Section):
    """Where spans go: `endpoint` is http://HOST:PORT or https://HOST:PORT, None for no tracing at all.

    A request that its client traces is traced, one that its client does not trace is not; of the others,
    `sample_ratio` are.
    """

    endpoint: str | None = Field(default=None, pattern=r"^https?://[^/]")
    protocol: Literal["grpc", "http"] = "grpc"
    sample_ratio: float = Field(default=1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _check_exporter(self) -> Self:
        if self.endpoint is not None:
            check_export(self.protocol)
        return self

    def source(self) -> TraceSource | None:
        """Return what decides on requests, or None where nothing is traced."""
        return None if self.endpoint is None else TraceSource(self.sample_ratio)

    def open_export(self, replica: str) -> SpanExport | None:
        """Return where the spans of a replica go, or None."""
        return (
            None if self.endpoint is None else open_export(self.endpoint, self.protocol, version(), replica)
        )


class ServerConfig(_Section):
    """One server. `draft` is a folder, "auto" (the one shipped for the model, if any) or "none".

    `num_gpus` is what Ray reserves per replica. `routing` sends a call to the replica that knows most of its
    prompt, load considered, or with "queue" to the shorter of two queues. `api_key_file` is read where the
    ingress runs, and `cors_origins` are the web pages whose scripts may call ("*" for all).
    `max_prompt_tokens` bounds a prompt below the context, `max_concurrent_calls` the calls in flight on one
    replica; more are answered 429. A stream without a first token gets a comment every `keep_alive_s`.
    A replica sends up to `messages_per_second` over all its streams; above that, steps share messages.
    `drain_timeout_s` bounds how long a stopping replica waits for its streams: set it to the longest answer.
    """

    model: str = DEFAULT_MODEL
    draft: str = AUTO_DRAFT
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    max_body_bytes: int = Field(default=10_000_000, ge=1)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_concurrent_calls: int | None = Field(default=None, ge=1)
    api_key_file: Path | None = None
    cors_origins: tuple[str, ...] = ()
    keep_alive_s: float = Field(default=15.0, gt=0)
    messages_per_second: float = Field(default=MESSAGES_PER_SECOND, gt=0)
    num_replicas: int = Field(default=1, ge=1)
    num_gpus: float = Field(default=0, ge=0)
    routing: Literal["prefix", "queue"] = "prefix"
    autoscaling: AutoscalingSection = AutoscalingSection()
    drain_timeout_s: float = Field(default=600.0, ge=0)
    tracing: TracingSection = TracingSection()
    engine: EngineSection = EngineSection()

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Let the engine's dataclasses find a bad size now, not when a replica starts."""
        _engine_config(self.engine, Path(self.model), None)
        return self

    @property
    def name(self) -> str:
        """The name that clients ask for."""
        return self.served_model_name or self.model.removeprefix("hf://").rstrip("/").rpartition("/")[2]

    def draft_folder(self) -> Path | None:
        """Return the folder of the draft, or None. Raises `ConfigError` where a named one is missing."""
        return draft_folder(self.model, self.draft)

    def engine_config(self, progress: bool = False) -> EngineConfig:
        """Return the engine's config, fetching the model where it is absent."""
        draft = self.draft_folder()
        return _engine_config(self.engine, resolve_model(self.model, progress), draft)


def load_config(path: Path | None, overrides: dict[str, Any]) -> ServerConfig:
    """Read a YAML file (or none) and lay `overrides` over it, whose dotted keys name nested ones.

    Raises `ConfigError` naming the key and the file.
    """
    values = {} if path is None else _read_yaml(path)
    for key, value in overrides.items():
        section = values
        *parents, last = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{path}: {parent} must be a section")
        section[last] = value
    try:
        return ServerConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "the configuration"
        text = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
        raise ConfigError(f"{path or 'configuration'}: {key}: {text}") from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a mapping of keys, found {type(values).__name__}")
    return values


def _engine_config(section: EngineSection, model: Path, draft: Path | None) -> EngineConfig:
    nested = {"speculation": SpeculationConfig, "precision": PrecisionConfig}
    sizes = {name: getattr(section, name) for name in EngineSection.model_fields if name not in nested}
    for name, kind in nested.items():
        mine = getattr(section, name)
        sizes[name] = kind(**{f.name: getattr(mine, f.name) for f in dataclasses.fields(kind)})
    return EngineConfig(model=model, draft=draft, **sizes)
