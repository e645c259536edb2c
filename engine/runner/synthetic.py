"""Networks of published shapes with random weights, made where they run.

What a step costs depends on shapes, not on what the weights say; which drafts are accepted does, and is left
to `replay`.
"""

import functools
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from engine.draft.config import DraftConfig
from engine.draft.head import DraftHead
from engine.errors import ConfigError
from engine.kvcache.kv_pool import KVPool
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotary
from engine.model.config import ModelConfig, RopeScaling
from engine.model.llama import LlamaForCausalLM

WEIGHT_STD = 0.02
DRAFT_VOCAB_SIZE = 32000
N = TypeVar("N", bound=nn.Module)


def _llama_3(num_layers: int, hidden_size: int, intermediate_size: int, num_heads: int) -> ModelConfig:
    """Return what the Llama 3.1 and 3.3 models have in common, in one of their sizes."""
    return ModelConfig(
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        max_position=131072,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
        dtype="bfloat16",
    )


SHAPES: dict[str, ModelConfig] = {
    "llama-3.1-8b": _llama_3(32, 4096, 14336, 32),
    "llama-3.3-70b": _llama_3(80, 8192, 28672, 64),
    "smollm2-135m": ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        rope_scaling=None,
        max_position=8192,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=1,
        eos_token_ids=(2,),
        dtype="bfloat16",
    ),
}


@dataclass(frozen=True, slots=True)
class NetworkSizes:
    """What one pass through a network reads and multiplies.

    `num_matrix` counts the parameters that meet every token, the output head included and the embedding not;
    `num_kept` all that are stored; `kv_bytes` is what one cached position takes.
    """

    num_matrix: int
    num_kept: int
    kv_bytes: int


def shape_of(name: str) -> ModelConfig:
    """Return the sizes of a published model. Raises `ConfigError` saying which are known."""
    if name not in SHAPES:
        raise ConfigError(f"synthetic weights exist for {', '.join(SHAPES)}, found {name!r}")
    return SHAPES[name]


def eagle3_config(target: ModelConfig) -> DraftConfig:
    """Return an EAGLE-3 head (arXiv 2503.01840) for `target`: one layer of its width over a low, a middle and
    a high tap, drafting over 32,000 tokens or all there are.
    """
    num_layers = target.num_layers
    return DraftConfig(
        num_layers=1,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
        max_position=target.max_position,
        taps=(min(2, num_layers), num_layers // 2, max(0, num_layers - 3)),
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        target_num_layers=num_layers,
        draft_vocab_size=min(DRAFT_VOCAB_SIZE, target.vocab_size),
        is_feedback_normed=False,
    )


def random_target(
    model: ModelConfig,
    taps: tuple[int, ...],
    num_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Return a target whose weights are N(0, 0.02), its norms 1, without a copy on the host."""
    with torch.device("meta"):
        target = LlamaForCausalLM(model, taps, num_positions=num_positions, dtype=dtype)
    target = _fill(target, device, seed)
    _fill_rotary(
        target.rotary, Rotary(model.head_dim, model.rope_theta, model.rope_scaling, num_positions, dtype)
    )
    return target


def random_head(
    config: DraftConfig, target: LlamaForCausalLM, num_positions: int, seed: int = 1
) -> DraftHead:
    """Return a head with such weights, bound to `target`; it drafts ids that are spread over all of its."""
    weight = target.embed_tokens.weight
    with torch.device("meta"):
        head = DraftHead(config, num_positions=num_positions, dtype=weight.dtype)
    head = _fill(head, weight.device, seed)
    _fill_rotary(
        head.rotary,
        Rotary(config.head_dim, config.rope_theta, config.rope_scaling, num_positions, weight.dtype),
    )
    ids = torch.arange(config.draft_vocab_size) * config.target_vocab_size // config.draft_vocab_size
    head.target_ids.copy_(ids)
    head.bind(weight, target.head_weight)
    return head


def fill_pages(pool: KVPool, seed: int = 2) -> None:
    """Write standard normal K and V into every page, as if any context had been cached there."""
    generator = torch.Generator(pool.k.device).manual_seed(seed)
    for pages in (*pool.k, *pool.v):
        # Half-precision numbers first: float8 pages know no random ones.
        pages.copy_(torch.randn(pages.shape, generator=generator, dtype=torch.bfloat16, device=pages.device))


@functools.cache
def target_sizes(model: ModelConfig, itemsize: int) -> NetworkSizes:
    """Count a target without making it."""
    with torch.device("meta"):
        target = LlamaForCausalLM(model, num_positions=1, dtype=torch.bfloat16)
    num_kept = sum(parameter.numel() for parameter in target.parameters())
    num_matrix = num_kept if model.tie_word_embeddings else num_kept - target.embed_tokens.weight.numel()
    return NetworkSizes(num_matrix, num_kept, 2 * model.num_layers * model.kv_size * itemsize)


@functools.cache
def head_sizes(config: DraftConfig, itemsize: int) -> NetworkSizes:
    """Count a draft head without making it, its rows of the output head included."""
    with torch.device("meta"):
        head = DraftHead(config, num_positions=1, dtype=torch.bfloat16)
    num_kept = sum(parameter.numel() for parameter in head.parameters())
    num_kept += config.draft_vocab_size * config.hidden_size
    return NetworkSizes(
        num_kept, num_kept, 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    )


def _fill(network: N, device: torch.device, seed: int) -> N:
    """Give a network of the meta device its weights on `device`; buffers stay undefined."""
    network = network.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    network.requires_grad_(False)
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=WEIGHT_STD, generator=generator)
    return network.eval()


def _fill_rotary(rotary: Rotary, computed: Rotary) -> None:
    for table, values in zip(rotary.buffers(), computed.buffers(), strict=True):
        table.copy_(values)
