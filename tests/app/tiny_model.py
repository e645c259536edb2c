"""A random Llama of two layers with a byte-level tokenizer, and a draft head for it, as ordinary folders.

What is asked of them is left to the tests.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.draft.config import DraftConfig
from engine.draft.head import DraftHead
from engine.draft.loader import save_draft
from tests.app.harness import write_model

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS, VOCAB = 32, 4, 2, 8, 64, 2, 258
MAX_POSITION = 1024


def write_random_model(folder: Path, words: Sequence[str] = ()) -> None:
    """Write the model; each of `words` is one more token, from id `VOCAB` on."""
    write_model(folder, words)
    vocab_size = VOCAB + len(words)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_POSITION,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (vocab_size, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": (MLP, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (MLP, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, MLP),
        }
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.3
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def write_random_draft(folder: Path, vocab_size: int = VOCAB) -> None:
    """Write a head that is right now and then: it hands the target's own last state to the output rows."""
    config = DraftConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position=MAX_POSITION,
        taps=(LAYERS,),
        target_hidden_size=HIDDEN,
        target_vocab_size=vocab_size,
        target_num_layers=LAYERS,
        draft_vocab_size=vocab_size,
        is_feedback_normed=True,
    )
    torch.manual_seed(1)
    head = DraftHead(config, num_positions=MAX_POSITION, dtype=torch.float32)
    with torch.no_grad():
        head.fc.weight.copy_(torch.eye(HIDDEN))
    save_draft(head, folder, {"made_by": "a test"})
