"""The heads of the `speculators` library, type eagle3.

What all formats share is in `formats`; loading a converted head is left to `loader`.
"""

from typing import Any

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
from engine.draft.formats_eagle import vocabulary_maps
from engine.draft.network import DraftNetwork
from engine.errors import ConfigError, ModelLoadError
from engine.model.config import ModelConfig

_AUX = "eagle_aux_hidden_state_layer_ids"
_LAYERS = "transformer_layer_config"
_VERSION = "0.3.0"


def read_speculators(
    checkpoint: Checkpoint, target: ModelConfig, digest: str, convention: TapConvention
) -> DraftNetwork:
    """Return a head of 1 to 3 layers.

    `norm_output` feeds the normed state back; `norm_before_residual` starts the residual stream from the
    normed feature; `norm_before_fc` norms all taps as one, `fc_norm` each by itself. All are off by default.
    """
    raw = checkpoint.config
    used = {"fc.weight", "lm_head.weight", "d2t", "t2d"}
    section = raw.get(_LAYERS)
    if not isinstance(section, dict):
        raise ModelLoadError(f"{checkpoint.folder}: the config needs {_LAYERS}, found {section!r}")
    sizes = LayerSizes.read(checkpoint.folder, section)
    draft_vocab_size = int(checkpoint.take("lm_head.weight").shape[0])
    has_own_embedding = "embed_tokens.weight" in checkpoint.tensors
    if _flag(checkpoint, "norm_before_fc") and _flag(checkpoint, "fc_norm"):
        raise ModelLoadError(f"{checkpoint.folder}: norm_before_fc and fc_norm cannot both be on")
    tap_norm = (
        "joint" if _flag(checkpoint, "norm_before_fc") else "each" if _flag(checkpoint, "fc_norm") else "none"
    )
    listed = raw.get(_AUX) or [2, target.num_layers // 2, target.num_layers - 3]
    if not isinstance(listed, list) or not all(type(layer_id) is int for layer_id in listed):
        raise ModelLoadError(f"{checkpoint.folder}: {_AUX} must be a list of layer indices, found {listed!r}")
    config = sizes.config(
        target,
        digest,
        taps=taps_of(listed, convention),
        draft_vocab_size=draft_vocab_size,
        is_feedback_normed=_flag(checkpoint, "norm_output"),
        is_residual_normed=_flag(checkpoint, "norm_before_residual"),
        tap_norm=tap_norm,
        has_own_head=True,
        has_own_embedding=has_own_embedding,
    )
    tensors = {
        "fc.weight": checkpoint.take("fc.weight"),
        "head_rows": checkpoint.take("lm_head.weight"),
        "target_ids": target_ids_of(checkpoint, draft_vocab_size),
    }
    for ours, stored in _norms(config.num_layers, tap_norm, len(config.taps)).items():
        tensors[f"{ours}.weight"] = checkpoint.take(f"{stored}.weight")
        used.add(f"{stored}.weight")
    for idx in range(config.num_layers):
        tensors |= read_layer(checkpoint, f"layers.{idx}", f"layers.{idx}", used)
    if has_own_embedding:
        tensors["embed_rows"] = checkpoint.take("embed_tokens.weight")
        used.add("embed_tokens.weight")
    checkpoint.check_used(frozenset(used), ("verifier_norm.weight", "verifier_lm_head.weight", "inv_freq"))
    return build_head(checkpoint.folder, config, tensors)


def write_speculators(
    head: DraftNetwork, target_name: str, num_drafts: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (config, tensors) of a bound head. Raises `ConfigError` for an EAGLE-1 head."""
    config, state = head.config, head.state_dict()
    if config.style != "eagle3":
        raise ConfigError("speculators checkpoints hold EAGLE-3 heads: export an eagle1 head as eagle1")
    tensors = {"fc.weight": state["fc.weight"], "lm_head.weight": head.head_rows, **vocabulary_maps(head)}
    for ours, stored in _norms(config.num_layers, config.tap_norm, len(config.taps)).items():
        tensors[f"{stored}.weight"] = state[f"{ours}.weight"]
    for idx in range(config.num_layers):
        tensors |= write_layer(head, idx, f"layers.{idx}")
    if config.has_own_embedding:
        tensors["embed_tokens.weight"] = head.embed_rows
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    fields = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.is_residual_normed,
        "norm_before_fc": config.tap_norm == "joint",
        "fc_norm": config.tap_norm == "each",
        "norm_output": config.is_feedback_normed,
        "target_hidden_size": (
            None if config.hidden_size == config.target_hidden_size else config.target_hidden_size
        ),
        _AUX: [tap + 1 for tap in config.taps],
        _LAYERS: layer_fields(config),
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": ["LlamaForCausalLM"]},
        },
    }
    return fields, tensors


def _norms(num_layers: int, tap_norm: str, num_taps: int) -> dict[str, str]:
    """Return the stored name of every norm by ours."""
    norms = {"norm": "norm", "feature_norm": "layers.0.hidden_norm"}
    if tap_norm == "joint":
        norms["tap_norms.0"] = "input_norm"
    elif tap_norm == "each":
        norms |= {f"tap_norms.{idx}": f"fc_norm.{idx}" for idx in range(num_taps)}
    for idx in range(num_layers):
        norms[f"layers.{idx}.input_norm"] = f"layers.{idx}.input_layernorm"
        norms[f"layers.{idx}.post_attention_norm"] = f"layers.{idx}.post_attention_layernorm"
    return norms


def _flag(checkpoint: Checkpoint, name: str) -> bool:
    value = checkpoint.config.get(name) or False
    if not isinstance(value, bool):
        raise ModelLoadError(f"{checkpoint.folder}: {name} must be true or false, found {value!r}")
    return value
