"""Writes a tiny random Llama, with a tokenizer of bytes and a chat template, to try the commands on.

It says nothing that makes sense; drafts for it can be trained in a minute all the same.
"""

import argparse
import json
from pathlib import Path

import tokenizers
import torch

from engine.weights.safetensors import write_safetensors

GAIN = 1.3  # over random weights that keep the size of their input: answers that are neither flat nor loops
HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 4, 4, 2, 16
SPECIALS = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_random_llama(folder: Path, seed: int) -> None:
    """Write the folder in the layout of Hugging Face."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder)
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
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(vocab_size).items():
        is_norm = len(shape) == 1
        values = torch.ones(shape) if is_norm else torch.randn(shape, generator=generator) * shape[1] ** -0.5
        tensors[name] = values if is_norm else values * GAIN
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})


def shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the model by their stored names."""
    named: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (vocab_size, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        named |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": (MLP, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (MLP, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, MLP),
        }
    return named


def write_tokenizer(folder: Path) -> int:
    """Write a tokenizer of two special tokens and one token per byte; return its size."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: idx for idx, token in enumerate((*SPECIALS, *alphabet))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "bos_token": SPECIALS[0], "eos_token": SPECIALS[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return len(vocab)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a tiny random Llama.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_random_llama(arguments.folder, arguments.seed)
