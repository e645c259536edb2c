"""A tiny target and head, and conversations of random tokens, for every test of training."""

import torch

from engine.draft.config import DraftConfig
from engine.draft.head import DraftHead
from engine.model.config import ModelConfig
from engine.model.llama import LlamaForCausalLM
from engine.training.dataset import Conversations
from engine.training.head_init import create_head, default_config
from engine.training.packed_attention import Documents
from engine.training.unroll import PackedTokens

VOCAB = 48
NUM_POSITIONS = 64


def tiny_target() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=1000.0,
        rope_scaling=None,
        max_position=NUM_POSITIONS,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=1,
        eos_token_ids=(2,),
        dtype="float32",
    )
    taps = tiny_config(config).taps
    target = LlamaForCausalLM(config, taps, num_positions=NUM_POSITIONS, dtype=torch.float32)
    with torch.no_grad():
        for param in target.parameters():
            if param.dim() == 2:
                param.normal_(std=0.3)
    return target.requires_grad_(False)


def tiny_config(target: ModelConfig, draft_vocab_size: int = 40, num_layers: int = 2) -> DraftConfig:
    return default_config(target, draft_vocab_size, num_layers)


def tiny_head(target: LlamaForCausalLM, num_layers: int = 2) -> DraftHead:
    """A head over every target token but the first eight, with weights large enough to have opinions."""
    config = tiny_config(target.config, num_layers=num_layers)
    head = create_head(config, target, torch.arange(8, VOCAB), NUM_POSITIONS, seed=5)
    with torch.no_grad():
        for param in head.parameters():
            if param.dim() == 2:
                param.mul_(10.0)
    return head


def conversations(lengths: list[int], seed: int = 0) -> Conversations:
    """Random conversations whose second half is the answer."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(3, VOCAB, (sum(lengths),), generator=generator, dtype=torch.int32)
    is_answer = torch.cat([torch.arange(length) >= length // 2 for length in lengths])
    return Conversations(token_ids, is_answer, torch.tensor(lengths))


def flat_tokens(data: Conversations) -> PackedTokens:
    positions = torch.cat([torch.arange(length) for length in data.lengths.tolist()])
    documents = Documents.from_positions(positions, int(data.lengths.max()))
    return PackedTokens(data.token_ids.long(), positions, data.is_answer, documents)
