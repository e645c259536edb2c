"""Random checkpoints of EAGLE-1, EAGLE-3 and speculators heads, and what each computes by its description.

The oracles read the stored tensors by their stored names, in float64, and share no code with the engine.
"""

import json
import math

import torch
from safetensors.torch import save_file

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 48, 40, 4, 2, 10
VOCAB, DRAFT_VOCAB, EPS, THETA = 320, 30, 1e-5, 10000.0
NUM_TAPS = 3


def layer_shapes(prefix, num_inputs, hidden):
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, num_inputs),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, num_inputs),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, num_inputs),
        f"{prefix}.self_attn.o_proj.weight": (hidden, HEADS * HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": (MLP, hidden),
        f"{prefix}.mlp.up_proj.weight": (MLP, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, MLP),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }


def layer_config(num_layers, hidden=HIDDEN, **changes):
    """A config as the official ones are: without a word about rotary positions."""
    return {
        "hidden_size": hidden,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": EPS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        **changes,
    }


def draw(shapes, dtype=torch.float32):
    """Random tensors that keep a signal: products of unit gain, norms around 1."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = (1 + 0.3 * values if "norm" in name else values / math.sqrt(shape[-1])).to(dtype)
    return tensors


def vocabulary():
    """Return (d2t, t2d): offsets from rising draft ids to target ids."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": t2d}


def write(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def write_eagle1(folder, num_layers=1, has_bias=True):
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN)} | ({"fc.bias": (HIDDEN,)} if has_bias else {})
    for idx in range(num_layers):
        shapes |= layer_shapes(f"layers.{idx}", HIDDEN, HIDDEN)
        if idx > 0:
            shapes[f"layers.{idx}.input_layernorm.weight"] = (HIDDEN,)
    config = {"architectures": ["LlamaForCausalLM"], **layer_config(num_layers, rope_theta=500000.0)}
    return write(folder, config if has_bias else {**config, "bias": False}, draw(shapes))


def write_eagle3(folder, hidden=HIDDEN, has_tap_norms=False, dtype=torch.float32, **changes):
    """An official EAGLE-3 head; one of another width than its target's brings its embedding."""
    shapes = {
        "fc.weight": (hidden, NUM_TAPS * HIDDEN),
        "norm.weight": (hidden,),
        "lm_head.weight": (DRAFT_VOCAB, hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        **layer_shapes("midlayer", 2 * hidden, hidden),
        **({f"fc_norm.{idx}.weight": (HIDDEN,) for idx in range(NUM_TAPS)} if has_tap_norms else {}),
    }
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
    if hidden != HIDDEN:
        shapes["embed_tokens.weight"] = (VOCAB, hidden)
        config["target_hidden_size"] = HIDDEN
    tensors = draw(shapes, dtype) | vocabulary()
    return write(folder, config | layer_config(1, hidden) | changes, tensors)


def write_speculators(folder, num_layers=1, has_vocabulary=True, **flags):
    num_rows = DRAFT_VOCAB if has_vocabulary else VOCAB
    shapes = {
        "fc.weight": (HIDDEN, NUM_TAPS * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (num_rows, HIDDEN),
        "layers.0.hidden_norm.weight": (HIDDEN,),
    }
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (NUM_TAPS * HIDDEN,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{idx}.weight": (HIDDEN,) for idx in range(NUM_TAPS)}
    for idx in range(num_layers):
        shapes |= layer_shapes(f"layers.{idx}", HIDDEN if idx else 2 * HIDDEN, HIDDEN)
        shapes[f"layers.{idx}.input_layernorm.weight"] = (HIDDEN,)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": num_rows,
        "transformer_layer_config": layer_config(num_layers, model_type="llama"),
        **flags,
    }
    return write(folder, config, draw(shapes) | (vocabulary() if has_vocabulary else {}))


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def linear(x, weight):
    return x @ weight.double().T


def turn(x, positions, theta):
    """Rotate x [T, heads, D] as Hugging Face Llama does: halves against each other."""
    half = HEAD_DIM // 2
    frequencies = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double()[:, None, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
    )


def decoder_layer(tensors, prefix, x, residual, positions, theta):
    """Return the stream after a layer that attends causally; x is what attention reads."""
    q, k, v = (
        linear(x, tensors[f"{prefix}.self_attn.{name}_proj.weight"]).view(len(x), -1, HEAD_DIM)
        for name in "qkv"
    )
    q, k = turn(q, positions, theta), turn(k, positions, theta)
    out = torch.zeros_like(q)
    for head_idx in range(HEADS):
        shared = head_idx // (HEADS // KV_HEADS)
        scores = q[:, head_idx] @ k[:, shared].T / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        out[:, head_idx] = scores.softmax(-1) @ v[:, shared]
    stream = residual + linear(out.flatten(1), tensors[f"{prefix}.self_attn.o_proj.weight"])
    x = norm(stream, tensors[f"{prefix}.post_attention_layernorm.weight"])
    gate, up = (linear(x, tensors[f"{prefix}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return stream + linear(gate / (1 + (-gate).exp()) * up, tensors[f"{prefix}.mlp.down_proj.weight"])


def eagle1_oracle(tensors, embedded, state, positions, num_layers=1):
    """Return (fed back, hidden before the target's output head) of EAGLE-1, section 3 of arXiv 2401.15077."""
    x = linear(torch.cat((embedded, state), -1), tensors["fc.weight"])
    x = x + (tensors["fc.bias"].double() if "fc.bias" in tensors else 0.0)
    for idx in range(num_layers):
        inner = norm(x, tensors[f"layers.{idx}.input_layernorm.weight"]) if idx else x
        x = decoder_layer(tensors, f"layers.{idx}", inner, x, positions, 500000.0)
    return x, x


def eagle3_oracle(tensors, embedded, taps, positions, first="midlayer", **flags):
    """Return (fed back, hidden before the head's own output rows) of EAGLE-3 and its variants."""
    if flags.get("norm_before_fc"):
        taps = norm(taps, tensors["input_norm.weight"])
    if f"fc_norm.{NUM_TAPS - 1}.weight" in tensors:
        parts = taps.chunk(NUM_TAPS, -1)
        taps = torch.cat([norm(part, tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
    feature = linear(taps, tensors["fc.weight"])
    normed = norm(feature, tensors[f"{first}.hidden_norm.weight"])
    x = torch.cat((norm(embedded, tensors[f"{first}.input_layernorm.weight"]), normed), -1)
    residual = normed if flags.get("norm_before_residual") else feature
    stream = decoder_layer(tensors, first, x, residual, positions, THETA)
    for idx in range(1, flags.get("num_layers", 1)):
        x = norm(stream, tensors[f"layers.{idx}.input_layernorm.weight"])
        stream = decoder_layer(tensors, f"layers.{idx}", x, stream, positions, THETA)
    hidden = norm(stream, tensors["norm.weight"])
    return (hidden if flags.get("norm_output") else stream), hidden
