"""A tiny Llama as a GGUF file, and modules that are nothing but named parameters."""

import numpy as np
import pytest
import torch
from torch import nn

BYTE_TOKENS = [
    chr(code) for start, end in ((33, 127), (161, 173), (174, 256), (256, 324)) for code in range(start, end)
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
SIZES = {"hidden": 64, "mlp": 96, "layers": 2, "heads": 4, "kv_heads": 2, "context": 128}


def tiny_vocab():
    return [*SPECIALS, *BYTE_TOKENS, *(merge.replace(" ", "") for merge in MERGES)]


def tiny_weights(is_tied=True):
    """Return the tensors of a tiny Llama under their Hugging Face names, float32 values exact in bfloat16."""
    generator = torch.Generator().manual_seed(7)
    hidden, mlp = SIZES["hidden"], SIZES["mlp"]
    kv = hidden // SIZES["heads"] * SIZES["kv_heads"]
    shapes = {"model.embed_tokens": (len(tiny_vocab()), hidden), "model.norm": (hidden,)}
    if not is_tied:
        shapes["lm_head"] = (len(tiny_vocab()), hidden)
    for layer_idx in range(SIZES["layers"]):
        prefix = f"model.layers.{layer_idx}"
        shapes |= {
            f"{prefix}.input_layernorm": (hidden,),
            f"{prefix}.self_attn.q_proj": (hidden, hidden),
            f"{prefix}.self_attn.k_proj": (kv, hidden),
            f"{prefix}.self_attn.v_proj": (kv, hidden),
            f"{prefix}.self_attn.o_proj": (hidden, hidden),
            f"{prefix}.post_attention_layernorm": (hidden,),
            f"{prefix}.mlp.gate_proj": (mlp, hidden),
            f"{prefix}.mlp.up_proj": (mlp, hidden),
            f"{prefix}.mlp.down_proj": (hidden, mlp),
        }
    return {
        f"{name}.weight": torch.randn(shape, generator=generator).bfloat16().float()
        for name, shape in shapes.items()
    }


def interleave(weight, num_heads):
    """Order the rows of q or k as GGUF does: row 2i of a head is its row i, row 2i + 1 its row i + D/2."""
    rows = []
    for head in weight.reshape(num_heads, -1, weight.shape[1]):
        half = len(head) // 2
        rows += [head[(i // 2) + (i % 2) * half] for i in range(len(head))]
    return np.stack(rows)


def gguf_name(name):
    for stored, ours in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ):
        name = name.replace(stored, ours)
    return name


@pytest.fixture
def write_gguf():
    """Return a function that writes a tiny Llama to a GGUF path; `fields` override metadata, None removes."""
    gguf = pytest.importorskip("gguf")

    def write(path, weights, embedding_type=None, **fields):
        writer = gguf.GGUFWriter(path, fields.pop("arch", "llama"))
        metadata = {
            "llama.block_count": SIZES["layers"],
            "llama.context_length": SIZES["context"],
            "llama.embedding_length": SIZES["hidden"],
            "llama.feed_forward_length": SIZES["mlp"],
            "llama.attention.head_count": SIZES["heads"],
            "llama.attention.head_count_kv": SIZES["kv_heads"],
            "llama.rope.dimension_count": SIZES["hidden"] // SIZES["heads"],
            "llama.rope.freq_base": 100000.0,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tiny_vocab(),
            "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tiny_vocab()) - len(SPECIALS)),
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.padding_token_id": 2,
            "tokenizer.chat_template": TEMPLATE,
        } | {key.replace("__", "."): value for key, value in fields.items()}
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        for key, value in metadata.items():
            if value is not None:
                add[type(value)](key, value)
        for name, tensor in weights.items():
            array = tensor.numpy()
            if name.endswith("q_proj.weight"):
                array = interleave(array, SIZES["heads"])
            if name.endswith("k_proj.weight"):
                array = interleave(array, SIZES["kv_heads"])
            if embedding_type is not None and name == "model.embed_tokens.weight":
                array = gguf.quantize(array, embedding_type)
                writer.add_tensor(gguf_name(name), array, raw_dtype=embedding_type)
            else:
                writer.add_tensor(gguf_name(name), array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def named_module():
    """Return a function that builds a module with zeroed parameters of the given dotted names and shapes."""

    def build(shapes, dtype=torch.float32):
        root = nn.Module()
        for name, shape in shapes.items():
            *folders, leaf = name.split(".")
            module = root
            for folder in folders:
                if folder not in dict(module.named_children()):
                    module.add_module(folder, nn.Module())
                module = module.get_submodule(folder)
            module.register_parameter(
                leaf, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            )
        return root

    return build


@pytest.fixture
def tiny_llama_weights():
    return tiny_weights
