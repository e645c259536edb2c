"""One Llama decoder layer, shared by the target and the draft head.

How queries find the keys of other tokens is left to the `Attend` that the caller passes in.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from engine.layers.norm import RMSNorm
from engine.layers.ops import LayerOps
from engine.layers.rotary import Angles

# attend(layer_idx, qkv [T, Hq + 2 * Hkv, D], angles) -> [T, Hq, D]: attention of the T tokens of this pass to
# each other and to whatever is cached. Queries and keys come unrotated: to rotate a key and to store it is
# one piece of work. It owns masks and caches, so a network runs on any of them unchanged.
Attend = Callable[[int, Tensor, Angles], Tensor]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of one decoder layer. `input_size` is the width that attention reads (wider in a draft's
    first).
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    input_size: int
    attention_bias: bool = False
    mlp_bias: bool = False


class DecoderLayer(nn.Module):
    """Attention and gated MLP around a residual stream.

    The caller normalises what attention reads, and adds what the MLP returns: both are one pass over the
    stream together with the norm of the layer before or after.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        num_qkv_heads = shape.num_heads + 2 * shape.num_kv_heads
        self.input_norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.qkv_proj = nn.Linear(shape.input_size, num_qkv_heads * shape.head_dim, bias=shape.attention_bias)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, hidden, bias=shape.attention_bias)
        self.post_attention_norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=shape.mlp_bias)

    def forward(
        self, x: Tensor, residual: Tensor, angles: Angles, attend: Attend, layer_idx: int, ops: LayerOps
    ) -> tuple[Tensor, Tensor]:
        """Return (delta, residual), both [T, hidden], whose sum is the stream after the layer, given x
        [T, input_size], already normalised.
        """
        # `forward` rather than a call, here and in the networks: nobody hooks these modules, and on a CPU a
        # call of a module costs as much as a small operation.
        qkv = self.qkv_proj.forward(x).view(x.shape[0], -1, self.shape.head_dim)
        attended = attend(layer_idx, qkv, angles)
        delta = self.o_proj.forward(attended.reshape(x.shape[0], -1))
        norm = self.post_attention_norm
        x, residual = ops.add_norm(delta, residual, norm.weight, norm.eps)
        return self.down_proj.forward(ops.silu_mul(self.gate_up_proj.forward(x))), residual
