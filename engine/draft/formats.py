"""Draft heads of other projects: what a checkpoint is, and the parts that their formats share.

One format is one file, `formats_eagle` and `formats_speculators`; our own folders are read by `loader`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from engine.draft.config import DraftConfig
from engine.draft.network import DraftNetwork, create_network
from engine.errors import DraftMismatchError, ModelLoadError
from engine.model.config import ModelConfig, RopeScaling
from engine.weights.json_object import read_json_object
from engine.weights.safetensors import SafetensorsFile
from engine.weights.shards import list_names

# What a number in a checkpoint's list of taps means: "inputs", the state that enters the layer of that index
# (SafeAILab, vLLM, speculators), or "outputs", the state that leaves it (NVIDIA's configs).
TapConvention = Literal["inputs", "outputs"]
Format = Literal["eagle1", "eagle3", "speculators"]
CONFIG, SAFETENSORS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
# Of our layers: which stored projections lie one below the other.
STACKS = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder's config as it stands there and its tensors by their stored names."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def take(self, name: str) -> Tensor:
        """Return a tensor that has to be there."""
        if name not in self.tensors:
            raise ModelLoadError(f"{self.folder} lacks the tensor {name}")
        return self.tensors[name]

    def check_used(self, used: frozenset[str], ignored: tuple[str, ...] = ()) -> None:
        """Raise `ModelLoadError` where tensors are left over: they would change what the head computes."""
        left = [name for name in self.tensors if name not in used and not name.endswith(ignored)]
        if left:
            raise ModelLoadError(
                f"{self.folder} holds tensors that its config does not explain: {list_names(left)}"
            )


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a folder of any format. Names lose the prefix `model.`, which some writers put before all.

    Raises `ModelLoadError` for a missing or damaged file; pickled weights are read as tensors only.
    """
    config = read_json_object(folder / CONFIG)
    if (folder / SAFETENSORS).is_file():
        file = SafetensorsFile(folder / SAFETENSORS)
        tensors = {name: file.read(name) for name in file.names()}
    elif (folder / PICKLE).is_file():
        tensors = _read_pickle(folder / PICKLE)
    else:
        raise ModelLoadError(f"{folder} must hold {SAFETENSORS} or {PICKLE}")
    return Checkpoint(folder, config, {name.removeprefix("model."): value for name, value in tensors.items()})


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the pickle machinery raises nothing narrower
        raise ModelLoadError(f"{path} cannot be read as tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ModelLoadError(f"{path} must hold tensors by name")
    return tensors


def detect_format(checkpoint: Checkpoint) -> Format:
    """Return the format of a checkpoint, by the marks that its writers leave."""
    config = checkpoint.config
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        if kind != "eagle3":
            raise ModelLoadError(
                f"{checkpoint.folder}: speculators heads of type eagle3 are read, found {kind!r}"
            )
        return "speculators"
    if "midlayer.mlp.down_proj.weight" in checkpoint.tensors:
        return "eagle3"
    if "fc.weight" in checkpoint.tensors and "layers.0.mlp.down_proj.weight" in checkpoint.tensors:
        return "eagle1"
    raise ModelLoadError(
        f"{checkpoint.folder} is no head of EAGLE-1, EAGLE-3 or speculators: it has neither midlayer.* nor "
        "fc.weight beside layers.0.*, and no speculators_model_type"
    )


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of a head's decoder layers and its rotary positions, as a Llama-like config states them."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int
    vocab_size: int

    @staticmethod
    def read(folder: Path, raw: Mapping[str, Any]) -> "LayerSizes":
        """Read the sizes of `raw`. Without a rope_theta the base is 10000: a head inherits no positions.

        Raises `ModelLoadError` where they make no decoder layer.
        """
        try:
            model = ModelConfig.from_hf({**raw, "architectures": ["LlamaForCausalLM"]})
        except ModelLoadError as error:
            raise ModelLoadError(f"{folder / CONFIG}: {error}") from error
        if model.attention_bias or model.mlp_bias:
            raise ModelLoadError(f"{folder / CONFIG}: heads with biases in their layers are not read")
        return LayerSizes(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            rms_norm_eps=model.rms_norm_eps,
            rope_theta=model.rope_theta,
            rope_scaling=model.rope_scaling,
            max_position=model.max_position,
            vocab_size=model.vocab_size,
        )

    def config(self, target: ModelConfig, digest: str, **fields: Any) -> DraftConfig:
        """Return the config of a head of these sizes for `target`; `fields` are the format's own.

        Rotary tables have no end, so a head serves texts as long as its target's.
        """
        if self.vocab_size != target.vocab_size:
            raise DraftMismatchError(
                f"the draft was made for a target with vocabulary size {self.vocab_size}, this target has "
                f"{target.vocab_size}: choose a draft trained for this model"
            )
        return DraftConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            max_position=max(self.max_position, target.max_position),
            target_hidden_size=target.hidden_size,
            target_vocab_size=target.vocab_size,
            target_num_layers=target.num_layers,
            base_model_digest=digest,
            has_first_pair=False,
            **fields,
        )


def read_layer(checkpoint: Checkpoint, stored: str, ours: str, used: set[str]) -> dict[str, Tensor]:
    """Return our tensors of one decoder layer, norms left out; names that are read go to `used`."""
    tensors = {}
    for name, parts in STACKS.items():
        names = [f"{stored}.{part}.weight" for part in parts]
        tensors[f"{ours}.{name}.weight"] = torch.cat([checkpoint.take(part) for part in names])
        used.update(names)
    return tensors


def write_layer(head: DraftNetwork, layer_idx: int, stored: str) -> dict[str, Tensor]:
    """Return the stored tensors of one decoder layer of `head`, norms left out."""
    config, state = head.config, head.state_dict()
    sizes = {
        "qkv_proj": [
            n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        ],
        "gate_up_proj": [config.intermediate_size] * 2,
    }
    tensors = {}
    for name, parts in STACKS.items():
        rows = state[f"layers.{layer_idx}.{name}.weight"]
        for part, value in zip(parts, torch.split(rows, sizes.get(name, [len(rows)])), strict=True):
            tensors[f"{stored}.{part}.weight"] = value
    return tensors


def taps_of(layer_ids: list[int], convention: TapConvention) -> tuple[int, ...]:
    """Return our taps, states *after* layers, of a checkpoint's list."""
    return tuple(layer_id - (convention == "inputs") for layer_id in layer_ids)


def target_ids_of(checkpoint: Checkpoint, draft_vocab_size: int) -> Tensor:
    """Return the target's id of each draft token from `d2t`, which holds offsets: id = draft id + d2t."""
    draft_ids = torch.arange(draft_vocab_size)
    offsets = checkpoint.tensors.get("d2t")
    if offsets is None:
        return draft_ids
    if offsets.shape != (draft_vocab_size,):
        raise ModelLoadError(
            f"{checkpoint.folder}: d2t must hold {draft_vocab_size} offsets, found {list(offsets.shape)}"
        )
    return draft_ids + offsets.long()


def build_head(folder: Path, config: DraftConfig, tensors: Mapping[str, Tensor]) -> DraftNetwork:
    """Return the network of `config` in float32 with `tensors`, by our names. Raises `ModelLoadError`."""
    head = create_network(config, num_positions=1, dtype=torch.float32)
    expected = head.state_dict()
    for name, value in expected.items():
        if name not in tensors:
            raise ModelLoadError(f"{folder}: nothing fills {name} of the head")
        if tensors[name].shape != value.shape:
            raise ModelLoadError(
                f"{folder}: {name} must have shape {list(value.shape)}, found {list(tensors[name].shape)}: "
                "the config and the weights do not belong together"
            )
    head.load_state_dict({name: tensors[name].to(value.dtype) for name, value in expected.items()})
    return head


def rope_fields(config: DraftConfig) -> dict[str, Any]:
    """Return the rotary settings of a head as a Hugging Face config states them."""
    fields: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_scaling": None}
    scaling = config.rope_scaling
    if scaling is not None:
        fields["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            fields["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
    return fields


def layer_fields(config: DraftConfig) -> dict[str, Any]:
    """Return the sizes of a head as a Hugging Face Llama config states them."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "vocab_size": config.target_vocab_size,
        "tie_word_embeddings": False,
        **rope_fields(config),
    }
