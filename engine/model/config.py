"""The sizes and constants of a target model, read from a Hugging Face `config.json`.

Weights are left to `engine/weights`, the network to `engine/model/llama.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from engine.errors import ModelLoadError
from engine.weights.json_object import read_json_object

ARCHITECTURE = "LlamaForCausalLM"
RopeKind = Literal["linear", "llama3"]
WeightDTypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    "linear" divides every frequency by `factor`; "llama3" only those whose wavelength is long against
    `original_max_position`, blended between the low and the high factor. The last three are 1, 1 and
    max_position for "linear", which does not read them.
    """

    kind: RopeKind
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ModelLoadError(f"rope kind must be linear or llama3, found {self.kind!r}")
        if not math.isfinite(self.factor) or self.factor < 1.0:
            raise ModelLoadError(f"rope factor must be a number of at least 1, found {self.factor}")
        if self.kind == "llama3" and not 0.0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ModelLoadError(
                "llama3 rope needs 0 < low_freq_factor < high_freq_factor, found "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One Llama network. Consistent once built; an impossible size raises `ModelLoadError` naming it.

    `dtype` is the dtype the weights were stored in, not the one an engine picks. `eos_token_ids` may be
    empty.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: WeightDTypeName

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_position"):
            if getattr(self, name) < 1:
                raise ModelLoadError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads != 0:
            raise ModelLoadError(
                f"num_heads must be a multiple of num_kv_heads ({self.num_kv_heads}), found {self.num_heads}"
            )
        if self.head_dim % 2 != 0:
            raise ModelLoadError(f"head_dim must be even for rotary positions, found {self.head_dim}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ModelLoadError(f"{name} must be positive and finite, found {value}")
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token_id < self.vocab_size:
                raise ModelLoadError(
                    f"special token ids must be under vocab_size ({self.vocab_size}), found {token_id}"
                )

    @property
    def query_size(self) -> int:
        """Rows of the query projection, Hq * D."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection, Hkv * D."""
        return self.num_kv_heads * self.head_dim

    @staticmethod
    def from_hf(raw: Mapping[str, Any]) -> "ModelConfig":
        """Build from the content of a `config.json`; keys that do not change the network are ignored.

        Raises `ModelLoadError` for another architecture, an unknown rope kind, quantized weights, and sizes
        that are missing or contradict each other.
        """
        _check_architecture(raw)
        num_heads = _integer(raw, "num_attention_heads")
        hidden_size = _integer(raw, "hidden_size")
        max_position = _integer(raw, "max_position_embeddings", 2048)
        rope_theta, rope_scaling = _read_rope(raw, max_position)
        return ModelConfig(
            vocab_size=_integer(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(raw, "intermediate_size"),
            num_layers=_integer(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_integer(raw, "num_key_value_heads", num_heads),
            head_dim=_read_head_dim(raw, hidden_size, num_heads),
            rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position=max_position,
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            attention_bias=_flag(raw, "attention_bias"),
            mlp_bias=_flag(raw, "mlp_bias"),
            bos_token_id=None if raw.get("bos_token_id") is None else _integer(raw, "bos_token_id"),
            eos_token_ids=_read_eos(raw),
            dtype=_read_dtype(raw),
        )

    @staticmethod
    def load(folder: Path) -> "ModelConfig":
        """Read `config.json`, and the end-of-text ids that `generation_config.json` adds, from `folder`."""
        config = ModelConfig.from_hf(read_json_object(folder / "config.json"))
        generation = folder / "generation_config.json"
        if not generation.is_file():
            return config
        added = _read_eos(read_json_object(generation))
        return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *added))))


def _check_architecture(raw: Mapping[str, Any]) -> None:
    architectures = raw.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise ModelLoadError(f"architectures must be [{ARCHITECTURE!r}], found {architectures!r}")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"hidden_act must be 'silu', found {activation!r}")
    if raw.get("quantization_config") is not None:
        raise ModelLoadError(
            "quantization_config is set: quantized checkpoints are not read, use the unquantized model"
        )


def _read_head_dim(raw: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if raw.get("head_dim") is not None:
        return _integer(raw, "head_dim")
    if num_heads < 1 or hidden_size % num_heads != 0:
        raise ModelLoadError(
            f"without head_dim, hidden_size must be a multiple of num_attention_heads, found {hidden_size} "
            f"and {num_heads}"
        )
    return hidden_size // num_heads


def _read_rope(raw: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling from `rope_parameters` (transformers 5), else `rope_theta`, `rope_scaling`."""
    name = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    scaling = raw.get(name)
    if scaling is None:
        return _number(raw, "rope_theta", 10000.0), None
    if not isinstance(scaling, dict):
        raise ModelLoadError(f"{name} must be an object, found {scaling!r}")
    theta = _number(scaling if "rope_theta" in scaling else raw, "rope_theta", 10000.0)
    if _number(scaling, "partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError(
            f"{name}: partial_rotary_factor must be 1, found {scaling['partial_rotary_factor']}"
        )
    kind = scaling.get("rope_type", scaling.get("type"))
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, RopeScaling("linear", _number(scaling, "factor"), 1.0, 1.0, max_position)
        case "llama3":
            return theta, RopeScaling(
                "llama3",
                _number(scaling, "factor"),
                _number(scaling, "low_freq_factor"),
                _number(scaling, "high_freq_factor"),
                _integer(scaling, "original_max_position_embeddings"),
            )
        case _:
            raise ModelLoadError(f"{name}: rope_type must be default, linear or llama3, found {kind!r}")


def _read_eos(raw: Mapping[str, Any]) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token_id) is not int for token_id in ids):
        raise ModelLoadError(f"eos_token_id must be a token id or a list of them, found {value!r}")
    return tuple(ids)


def _read_dtype(raw: Mapping[str, Any]) -> WeightDTypeName:
    value = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    match value:
        case "float32" | "bfloat16" | "float16":
            return value
        case _:
            raise ModelLoadError(f"dtype must be float32, bfloat16 or float16, found {value!r}")


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if type(value) is not int:
        raise ModelLoadError(f"{key} must be an integer, found {value!r}")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelLoadError(f"{key} must be a number, found {value!r}")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise ModelLoadError(f"{key} must be true or false, found {value!r}")
    return value
