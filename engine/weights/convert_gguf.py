"""Conversion of a Llama GGUF file into an ordinary Hugging Face folder, done once per model.

The dequantized bfloat16 weights become the reference weights of that model. Where the file comes from is
left to `pull`, its tokenizer to `gguf_tokenizer`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.weights.gguf_tokenizer import build_tokenizer, build_tokenizer_config
from engine.weights.safetensors import write_safetensors

Report = Callable[[int, int], None]  # called with (tensors converted, tensors in all)

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(gguf_path: Path, folder: Path, report: Report) -> None:
    """Write config, tokenizer and bfloat16 weights of `gguf_path` into the existing `folder`.

    Deterministic: the same file gives the same bytes everywhere. Raises `ModelLoadError` where the file is
    corrupt or is not a Llama with a tokenizer that can be rebuilt; an `OSError` of writing passes through.
    """
    reader = _open_reader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    try:
        config = _build_config(fields, is_tied=all(t.name != "output.weight" for t in reader.tensors))
        tokenizer = build_tokenizer(fields)
        tokenizer_config = build_tokenizer_config(fields, config["max_position_embeddings"])
    except (KeyError, IndexError, TypeError) as error:
        raise ModelLoadError(f"{gguf_path} lacks metadata or holds bad metadata: {error!r}") from error
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(tokenizer_config, encoding="utf-8")
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    tensors = {}
    for tensor_idx, stored in enumerate(reader.tensors, start=1):
        name = hugging_face_name(stored.name)
        tensors[name] = _read_tensor(gguf_path, stored, name, config)
        report(tensor_idx, len(reader.tensors))
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})


def hugging_face_name(gguf_name: str) -> str:
    """Return the Hugging Face name of a tensor of a Llama GGUF; an unknown one raises `ModelLoadError`."""
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer_idx, part, "weight"] if layer_idx.isdecimal() and part in _LAYER_NAMES:
            return f"model.layers.{layer_idx}.{_LAYER_NAMES[part]}.weight"
        case _:
            raise ModelLoadError(f"a Llama GGUF has no tensor {gguf_name!r}: this kind is not converted")


def undo_rotary_permutation(weight: Tensor, num_heads: int) -> Tensor:
    """Return q or k rows [H * D, hidden] in the order of rotate-half rotary positions.

    GGUF stores the two halves of a head interleaved, (x_0, x_{D/2}, x_1, x_{D/2+1}, ...), for rotary pairs
    of neighbours; Hugging Face pairs x_i with x_{i + D/2}.
    """
    rows, width = weight.shape
    half = rows // num_heads // 2
    return weight.view(num_heads, half, 2, width).transpose(1, 2).reshape(rows, width)


def _open_reader(gguf_path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelLoadError("converting a GGUF file needs the gguf package: pip install gguf") from error
    try:
        return GGUFReader(gguf_path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelLoadError(f"{gguf_path} is no readable GGUF file: {error}") from error


def _read_tensor(gguf_path: Path, stored: Any, name: str, config: dict[str, Any]) -> Tensor:
    """Return one stored tensor, dequantized, as bfloat16 on the CPU."""
    from gguf import dequantize

    try:
        weight = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
    except (ValueError, NotImplementedError) as error:
        raise ModelLoadError(f"{gguf_path}: tensor {stored.name!r} cannot be dequantized: {error}") from error
    if name.endswith("q_proj.weight"):
        weight = undo_rotary_permutation(weight, config["num_attention_heads"])
    if name.endswith("k_proj.weight"):
        weight = undo_rotary_permutation(weight, config["num_key_value_heads"])
    return weight.to(torch.bfloat16)


def _build_config(fields: dict[str, Any], is_tied: bool) -> dict[str, Any]:
    """Return the content of `config.json` from GGUF metadata."""
    if fields["general.architecture"] != "llama":
        raise ModelLoadError(f"a GGUF must hold a llama, found {fields['general.architecture']!r}")
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise ModelLoadError(f"scaled rope is not converted, found {fields['llama.rope.scaling.type']!r}")
    num_heads = fields["llama.attention.head_count"]
    hidden_size = fields["llama.embedding_length"]
    head_dim = fields.get("llama.attention.key_length", hidden_size // num_heads)
    if fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelLoadError(f"rope must turn all {head_dim} dimensions of a head, found a part of them")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(fields.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": is_tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32, since GGUF stores 1e-05 as 9.9999997e-06."""
    return float(f"{value:.7g}")
