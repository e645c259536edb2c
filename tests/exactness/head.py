"""A random draft head for the tiny target, with pages of its own. Driving it is left to the engine."""

import torch

from engine.attention.backend import AttentionBackend
from engine.draft.config import DraftConfig
from engine.draft.drafter import Drafter
from engine.draft.head import DraftHead
from engine.draft.network import DraftNetwork
from engine.kvcache.kv_pool import KVPool
from engine.model.llama import LlamaForCausalLM
from engine.runner.worker import choose_draft_ops
from tests.exactness.tiny import CONFIG, MAX_LEN, TAPS, VOCAB, EngineShape, exact_backend, runner_shape

DRAFT = DraftConfig(
    num_layers=2,
    hidden_size=CONFIG.hidden_size,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position=MAX_LEN,
    taps=TAPS,
    target_hidden_size=CONFIG.hidden_size,
    target_vocab_size=VOCAB,
    target_num_layers=CONFIG.num_layers,
    draft_vocab_size=40,
    is_feedback_normed=True,
)


def build_drafter(
    shape: EngineShape,
    target: LlamaForCausalLM,
    backend: AttentionBackend | None = None,
    config: DraftConfig = DRAFT,
) -> Drafter:
    torch.manual_seed(3)
    head = DraftHead(config, num_positions=MAX_LEN + 128, dtype=torch.float32)
    head.to(target.embed_tokens.weight.device)
    head.target_ids.copy_(torch.randperm(VOCAB)[: config.draft_vocab_size])
    head.requires_grad_(False).bind(target.embed_tokens.weight, target.head_weight)
    return make_drafter(shape, head, backend)


def make_drafter(shape: EngineShape, head: DraftNetwork, backend: AttentionBackend | None = None) -> Drafter:
    """Return a drafter of a head that is bound to the tiny target."""
    device, config = head.target_ids.device, head.config
    sizes = runner_shape(shape, shape.feature_window - 1)
    kv_shape = (config.num_kv_heads, config.head_dim, torch.float32, device)
    pool = KVPool(config.num_layers, sizes.num_blocks, shape.block_size, *kv_shape)
    backend = backend or exact_backend(device)
    return Drafter(head, pool, backend, shape.block_size, choose_draft_ops(device))
