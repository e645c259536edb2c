"""The heads of SafeAILab's EAGLE repository: EAGLE-1 (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840).

What all formats share is in `formats`; loading a converted head is left to `loader`.
"""

from typing import Any

import torch
from torch import Tensor

from engine.draft.formats import (
    Checkpoint,
    LayerSizes,
    TapConvention,
    build_head,
    layer_fields,
    read_layer,
    taps_of,
    target_ids_of,
    write_layer,
)
from engine.draft.network import DraftNetwork
from engine.errors import ConfigError, ModelLoadError
from engine.model.config import ModelConfig

_AUX = "eagle_aux_hidden_state_layer_ids"


def read_eagle1(checkpoint: Checkpoint, target: ModelConfig, digest: str) -> DraftNetwork:
    """Return an EAGLE-1 head. A config without `bias` means that the joining layer has one."""
    raw, used = checkpoint.config, {"fc.weight"}
    sizes = LayerSizes.read(checkpoint.folder, raw)
    config = sizes.config(
        target,
        digest,
        style="eagle1",
        taps=(target.num_layers,),
        draft_vocab_size=target.vocab_size,
        is_feedback_normed=False,
        has_fc_bias=bool(raw.get("bias", True)),
    )
    tensors = {"fc.weight": checkpoint.take("fc.weight"), "target_ids": torch.arange(target.vocab_size)}
    if config.has_fc_bias:
        tensors["fc.bias"] = checkpoint.take("fc.bias")
        used.add("fc.bias")
    for idx in range(config.num_layers):
        layer = f"layers.{idx}"
        tensors |= read_layer(checkpoint, layer, layer, used)
        norms = {"post_attention_norm": "post_attention_layernorm"}
        if idx > 0:
            norms["input_norm"] = "input_layernorm"
        tensors |= _read_norms(checkpoint, {f"{layer}.{k}": f"{layer}.{v}" for k, v in norms.items()}, used)
    # The embedding is the target's own, stored along with some heads.
    checkpoint.check_used(frozenset(used), ("embed_tokens.weight", "rotary_emb.inv_freq"))
    return build_head(checkpoint.folder, config, tensors)


def read_eagle3(
    checkpoint: Checkpoint, target: ModelConfig, digest: str, convention: TapConvention
) -> DraftNetwork:
    """Return an EAGLE-3 head of one layer. Without a list of taps they are the states that enter layers 2,
    L // 2 and L - 3 of the target.
    """
    raw, used = checkpoint.config, {"fc.weight", "lm_head.weight", "d2t", "t2d"}
    sizes = LayerSizes.read(checkpoint.folder, raw)
    has_own_embedding = "embed_tokens.weight" in checkpoint.tensors
    if raw.get("target_hidden_size") not in (None, target.hidden_size):
        raise ModelLoadError(
            f"{checkpoint.folder} was made for hidden size {raw['target_hidden_size']}, the target has "
            f"{target.hidden_size}: choose a draft trained for this model"
        )
    draft_vocab_size = int(checkpoint.take("lm_head.weight").shape[0])
    num_tap_norms = sum(name.startswith("fc_norm.") for name in checkpoint.tensors)
    config = sizes.config(
        target,
        digest,
        taps=_read_taps(raw, target, convention),
        draft_vocab_size=draft_vocab_size,
        is_feedback_normed=False,
        tap_norm="each" if num_tap_norms else "none",
        has_own_head=True,
        has_own_embedding=has_own_embedding,
    )
    tensors = {
        "fc.weight": checkpoint.take("fc.weight"),
        "head_rows": checkpoint.take("lm_head.weight"),
        "target_ids": target_ids_of(checkpoint, draft_vocab_size),
        **read_layer(checkpoint, "midlayer", "layers.0", used),
    }
    norms = {
        "norm": "norm",
        "feature_norm": "midlayer.hidden_norm",
        "layers.0.input_norm": "midlayer.input_layernorm",
        "layers.0.post_attention_norm": "midlayer.post_attention_layernorm",
        **{f"tap_norms.{idx}": f"fc_norm.{idx}" for idx in range(num_tap_norms)},
    }
    tensors |= _read_norms(checkpoint, norms, used)
    if has_own_embedding:
        tensors["embed_rows"] = checkpoint.take("embed_tokens.weight")
        used.add("embed_tokens.weight")
    checkpoint.check_used(frozenset(used), ("rotary_emb.inv_freq",))
    return build_head(checkpoint.folder, config, tensors)


def write_eagle1(head: DraftNetwork) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (config, tensors) of an EAGLE-1 checkpoint. Raises `ConfigError` for another kind of head."""
    config, state = head.config, head.state_dict()
    if config.style != "eagle1" or config.draft_vocab_size != config.target_vocab_size:
        raise ConfigError("only heads of style eagle1 over the whole vocabulary are EAGLE-1 heads")
    tensors: dict[str, Tensor] = {name: state[name] for name in state if name.startswith("fc.")}
    for idx in range(config.num_layers):
        layer = f"layers.{idx}"
        tensors |= write_layer(head, idx, layer)
        tensors[f"{layer}.post_attention_layernorm.weight"] = state[f"{layer}.post_attention_norm.weight"]
        if idx > 0:
            tensors[f"{layer}.input_layernorm.weight"] = state[f"{layer}.input_norm.weight"]
    fields = {"architectures": ["LlamaForCausalLM"], "bias": config.has_fc_bias, **layer_fields(config)}
    return fields, tensors


def write_eagle3(head: DraftNetwork) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (config, tensors) of an EAGLE-3 checkpoint of a bound head.

    Raises `ConfigError` for a head that this format cannot say: another number of layers, or norms elsewhere.
    """
    config, state = head.config, head.state_dict()
    if config.style != "eagle3" or config.num_layers != 1:
        raise ConfigError(f"EAGLE-3 checkpoints have one layer, this {config.style} head {config.num_layers}")
    if config.is_feedback_normed or config.is_residual_normed or config.tap_norm == "joint":
        raise ConfigError(
            "an EAGLE-3 checkpoint feeds back the state before its norm and starts from the fused feature: "
            "export this head as speculators"
        )
    tensors = {
        "fc.weight": state["fc.weight"],
        "norm.weight": state["norm.weight"],
        "lm_head.weight": head.head_rows,
        "midlayer.hidden_norm.weight": state["feature_norm.weight"],
        "midlayer.input_layernorm.weight": state["layers.0.input_norm.weight"],
        "midlayer.post_attention_layernorm.weight": state["layers.0.post_attention_norm.weight"],
        **write_layer(head, 0, "midlayer"),
        **{
            f"fc_norm.{idx}.weight": state[f"tap_norms.{idx}.weight"]
            for idx in range(len(config.taps) if config.tap_norm == "each" else 0)
        },
        **vocabulary_maps(head),
    }
    if config.has_own_embedding:
        tensors["embed_tokens.weight"] = head.embed_rows
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        _AUX: [tap + 1 for tap in config.taps],
        **layer_fields(config),
    }
    if config.hidden_size != config.target_hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    return fields, tensors


def vocabulary_maps(head: DraftNetwork) -> dict[str, Tensor]:
    """Return `d2t`, the offset from each draft id to its target id, and `t2d`, the target ids drafted."""
    is_drafted = torch.zeros(head.config.target_vocab_size, dtype=torch.bool)
    is_drafted[head.target_ids.cpu()] = True
    return {"d2t": head.target_ids.cpu() - torch.arange(head.config.draft_vocab_size), "t2d": is_drafted}


def _read_norms(checkpoint: Checkpoint, norms: dict[str, str], used: set[str]) -> dict[str, Tensor]:
    """Return norm weights by our names from their stored ones."""
    used.update(f"{stored}.weight" for stored in norms.values())
    return {f"{ours}.weight": checkpoint.take(f"{stored}.weight") for ours, stored in norms.items()}


def _read_taps(raw: Any, target: ModelConfig, convention: TapConvention) -> tuple[int, ...]:
    """Return our taps from the list of a config, which may stand in a section of its own, or the default."""
    section = raw.get("eagle_config")
    listed = raw.get(_AUX) or (section.get(_AUX) if isinstance(section, dict) else None)
    if listed is None:
        return taps_of([2, target.num_layers // 2, target.num_layers - 3], "inputs")
    if not isinstance(listed, list) or not all(type(layer_id) is int for layer_id in listed):
        raise ModelLoadError(f"{_AUX} must be a list of layer indices, found {listed!r}")
    return taps_of(listed, convention)
