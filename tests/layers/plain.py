"""The layers written out plainly in float64, one token and one head at a time: what is right."""

import torch

from engine.layers.rotary import rotate_qkv


def plain_norm(norm, x):
    """Return RMSNorm of x [T, size]."""
    mean_square = (x.double() ** 2).sum(-1, keepdim=True) / x.shape[-1]
    return x.double() / (mean_square + norm.eps).sqrt() * norm.weight.double()


def plain_rotate(x, positions, frequencies):
    """Turn the pairs (i, i + D/2) of x [T, heads, D] by position * frequency, as complex numbers."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = positions.double()[:, None, None] * frequencies
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def plain_linear(layer, x):
    bias = 0.0 if layer.bias is None else layer.bias.double()
    return x @ layer.weight.double().T + bias


def plain_causal(q, k, v):
    """Attend of T tokens of one sequence to each other: q [T, Hq, D], k and v [T, Hkv, D]."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for token in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys, values = k[: token + 1, head // group], v[: token + 1, head // group]
            weights = (keys @ q[token, head] / q.shape[-1] ** 0.5).softmax(0)
            out[token, head] = weights @ values
    return out


def plain_layer(layer, x, residual, positions, frequencies):
    """Return the residual stream after a DecoderLayer over one sequence, causal."""
    shape = layer.shape
    qkv = plain_linear(layer.qkv_proj, x.double()).view(len(x), -1, shape.head_dim)
    q, k, v = qkv.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), 1)
    q, k = (plain_rotate(heads, positions, frequencies) for heads in (q, k))
    residual = residual.double() + plain_linear(layer.o_proj, plain_causal(q, k, v).flatten(1))
    hidden = plain_linear(layer.gate_up_proj, plain_norm(layer.post_attention_norm, residual))
    gate, up = hidden[:, : shape.intermediate_size], hidden[:, shape.intermediate_size :]
    return residual + plain_linear(layer.down_proj, gate / (1 + (-gate).exp()) * up)


def attend_causally(num_kv_heads):
    """Return an `Attend` over one sequence, for networks that are compared with the above."""

    def attend(layer_idx, qkv, angles):
        q, k, v = rotate_qkv(qkv, angles, num_kv_heads)
        return plain_causal(q.double(), k.double(), v.double()).to(qkv.dtype)

    return attend
