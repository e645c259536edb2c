"""Linear layers whose weights lie in the order that a CPU's matrix kernels read.

With plain weights oneDNN reorders them in every call, which at a few tokens costs more than the product.
Which networks are packed is left to the runner.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

# The operators that torch's own compiler emits: the public mkldnn layers would convert every input.
_ONEDNN = torch.ops.mkldnn
_NUM_TOKENS = 32  # what the order is chosen for; measured as good from 1 to 512 tokens as one made for each


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this machine has packed kernels for `dtype`."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.float32:
        return True
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return bool(getattr(_ONEDNN, name)())


class PackedLinear(nn.Module):
    """y = x W^T + b with a packed copy of W [out, in]; neither trained nor saved."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self._weight = _ONEDNN._reorder_linear_weight(weight.detach(), _NUM_TOKENS)  # noqa: SLF001
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for x [..., in]."""
        y: Tensor = _ONEDNN._linear_pointwise(  # noqa: SLF001
            x, self._weight, self._bias, "none", [], ""
        )
        return y


def pack_linears(network: nn.Module) -> None:
    """Pack every `nn.Linear` inside `network`."""
    replace_linears(network, PackedLinear)


def replace_linears(
    network: nn.Module,
    make: Callable[[Tensor, Tensor | None], nn.Module],
    names: tuple[str, ...] | None = None,
) -> None:
    """Replace every `nn.Linear` inside `network`, or those of `names`, by what `make` answers to its weight
    and bias; plain weights are freed on the way.
    """
    for name, child in list(network.named_children()):
        if not isinstance(child, nn.Linear):
            replace_linears(child, make, names)
        elif names is None or name in names:
            setattr(network, name, make(child.weight, child.bias))
