"""A fresh draft head for a target, before any training.

Training it is left to `trainer`, choosing its vocabulary to `vocab_select`.
"""

import torch
from torch import Tensor

from engine.draft.config import DraftConfig, HeadStyle
from engine.draft.network import DraftNetwork, create_network
from engine.model.config import ModelConfig
from engine.model.llama import LlamaForCausalLM

_STD = 0.02
# The two projections that write to the residual stream start smaller, so that a fresh layer changes it
# little.
_WRITER_SHARE = 0.5
_WRITERS = ("o_proj.weight", "down_proj.weight")


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return a low, a middle and the last layer, the taps of the shipped head (4, 14, 29 of 30 layers)."""
    return tuple(sorted({num_layers * 4 // 30, max(num_layers // 2 - 1, 0), num_layers - 1}))


def default_config(
    target: ModelConfig,
    draft_vocab_size: int,
    num_layers: int = 2,
    base_model_digest: str | None = None,
    style: HeadStyle = "eagle3",
) -> DraftConfig:
    """Return the config of a head whose layers have the target's own sizes and rotary positions."""
    is_eagle1 = style == "eagle1"
    return DraftConfig(
        num_layers=num_layers,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
        max_position=target.max_position,
        taps=(target.num_layers,) if is_eagle1 else default_taps(target.num_layers),
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        target_num_layers=target.num_layers,
        draft_vocab_size=draft_vocab_size,
        is_feedback_normed=not is_eagle1,
        base_model_digest=base_model_digest,
        style=style,
        has_fc_bias=is_eagle1,
    )


def create_head(
    config: DraftConfig, target: LlamaForCausalLM, target_ids: Tensor, num_positions: int, seed: int
) -> DraftNetwork:
    """Return a head with random weights in the target's dtype and on its device, bound to it.

    target_ids: [draft_vocab_size] int64. Training rows of L tokens with S draft steps need L + S positions.
    """
    assert target_ids.shape == (config.draft_vocab_size,), (target_ids.shape, config.draft_vocab_size)
    weight = target.head_weight
    head = create_network(config, num_positions=num_positions, dtype=weight.dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in head.named_parameters():
            if param.dim() == 2:
                std = _STD * (_WRITER_SHARE if name.endswith(_WRITERS) else 1.0)
                param.copy_(torch.empty(param.shape).normal_(std=std, generator=generator))
            elif name.endswith(".bias"):
                param.zero_()  # torch draws it from a state that depends on the process
    head.target_ids.copy_(target_ids)
    head.to(weight.device)
    head.bind(target.embed_tokens.weight, weight)
    return head
