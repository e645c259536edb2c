"""Linear layers of some tokens on the algorithm of cuBLASLt that measured fastest for their shape.

Where a weight is read for a few hundred tokens at most, the library's own choice is up to a tenth slower than
the best it has. Choices are made while steps are recorded, never while requests wait. The products are left
to `kernels/cublaslt`.
"""

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

logger = logging.getLogger(__name__)

MIN_TOKENS, MAX_TOKENS = 17, 256  # outside of which the layers of a network had nothing to gain
_GAIN = 0.98  # of torch's time that an algorithm may take at most: noise must not choose
_NUM_ROUNDS = 7  # replays of each candidate
_REPLAY_BYTES, _MIN_CALLS, _MAX_CALLS = 1 << 30, 3, 24  # of weights read in one, by so many products
_ALIGNMENT = 256  # bytes at whose multiples matrices begin, unless they are parts of others
_CACHE_SHARE = 1.5  # of the L2 cache that the weights of a replay exceed, as those of a network do

Multiply = Callable[[Tensor, Tensor], Tensor]  # (x [M, K], W [N, K]) -> x W^T [M, N]
_is_choosing: ContextVar[bool] = ContextVar("is_choosing", default=False)


@contextmanager
def choosing() -> Iterator[None]:
    """Let products of sizes that were not met before be chosen meanwhile, in this thread."""
    token = _is_choosing.set(True)
    try:
        yield
    finally:
        _is_choosing.reset(token)


class ProductTuner:
    """The fastest product for weights of one shape, by number of tokens.

    `weights` [N, K], 16 bits, on one CUDA device, are those of layers that run one after another. `usual` is
    torch's product into `out_dtype`; others are tried for `num_tokens`. Not thread-safe.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        usual: Multiply = F.linear,
        out_dtype: torch.dtype | None = None,
        num_tokens: range = range(MIN_TOKENS, MAX_TOKENS + 1),
    ) -> None:
        self._weights, self._usual = weights, usual
        self._out_dtype, self._num_tokens = out_dtype or weights[0].dtype, num_tokens
        self._workspace: Tensor | None = None
        self._chosen: dict[int, Multiply] = {}

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W^T [M, N] for contiguous x [M, K] and one of the weights."""
        num_tokens = x.shape[0]
        if num_tokens not in self._chosen and _is_choosing.get() and num_tokens in self._num_tokens:
            self._chosen[num_tokens] = self._choose(num_tokens)
        multiply = self._chosen.get(num_tokens, self._usual)
        return multiply(x, weight) if x.data_ptr() % _ALIGNMENT == 0 else self._usual(x, weight)

    def _choose(self, num_tokens: int) -> Multiply:
        from engine.kernels.cublaslt import ProductError

        try:
            candidates = [self._usual, *self._candidates(num_tokens)]
            seconds = _time(candidates, num_tokens, self._exceeding())
        except (OSError, ProductError) as error:
            logger.warning("products of %s are left to torch: %s", tuple(self._weights[0].shape), error)
            self._num_tokens = range(0)
            return self._usual
        torch.cuda.empty_cache()  # what timing took is of no use to graphs, which have memory of their own
        best = min(range(len(candidates)), key=seconds.__getitem__)
        logger.debug(
            "product tokens=%d outputs=%d inputs=%d torch_us=%.1f best_us=%.1f",
            *(num_tokens, *self._weights[0].shape, 1e6 * seconds[0], 1e6 * seconds[best]),
        )
        return candidates[best] if seconds[best] < _GAIN * seconds[0] else self._usual

    def _candidates(self, num_tokens: int) -> list[Multiply]:
        from engine.kernels.cublaslt import WORKSPACE_BYTES, Product

        weight = self._weights[0]
        num_outputs, num_inputs = weight.shape
        product = Product(num_tokens, num_outputs, num_inputs, weight.dtype, self._out_dtype)
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=weight.device)
        multiply = partial(product.multiply, workspace=self._workspace)
        return [partial(multiply, algorithm=algorithm) for algorithm in product.algorithms()]

    def _exceeding(self) -> list[Tensor]:
        """Return weights, or copies where a network has too few, that the L2 cache does not hold."""
        size = self._weights[0].nbytes
        cache = torch.cuda.get_device_properties(self._weights[0].device).L2_cache_size
        wanted = int(_CACHE_SHARE * cache / size) + 1
        some = [weight.detach() for weight in self._weights[:wanted]]
        return [*some, *(some[0].clone() for _ in range(wanted - len(some)))]


class TunedLinear(nn.Linear):
    """An `nn.Linear` without bias that shares its weight with another and multiplies by a tuner's choice."""

    def __init__(self, linear: nn.Linear, tuner: ProductTuner) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.tuner = linear.weight, tuner

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for x [..., in]."""
        is_like_weight = x.dtype is self.weight.dtype and x.device == self.weight.device
        if x.dim() != 2 or not x.is_contiguous() or not is_like_weight or x.requires_grad:
            return F.linear(x, self.weight)
        return self.tuner.multiply(x, self.weight)


class WideLinear(nn.Module):
    """y = x W^T in float32 of operands in 16 bits, on CUDA: what nearly ties is not rounded into a tie.

    Neither trained nor saved; the weight is shared.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._weight = weight.detach()
        all_tokens = range(1, MAX_TOKENS + 1) if _is_aligned(weight) else range(0)
        self.tuner = ProductTuner((self._weight,), _multiply_wide, torch.float32, all_tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, out] float32 for x [T, in]."""
        return self.tuner.multiply(x.contiguous(), self._weight)


def tune_linears(network: nn.Module) -> None:
    """Replace every `nn.Linear` of 16 bits without bias inside `network`, whose weights are on CUDA, frozen,
    and run one after another.
    """
    linears = [module for module in network.modules() if type(module) is nn.Linear and _is_tunable(module)]
    weights: dict[torch.Size, list[Tensor]] = {}
    for linear in linears:
        weights.setdefault(linear.weight.shape, []).append(linear.weight)
    tuners = {shape: ProductTuner(some) for shape, some in weights.items()}
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if child in linears:
                setattr(module, name, TunedLinear(child, tuners[child.weight.shape]))


def _is_tunable(linear: nn.Linear) -> bool:
    weight, has_bias = linear.weight, linear.bias is not None
    is_fit = weight.is_cuda and weight.dtype.itemsize == 2 and _is_aligned(weight)
    return is_fit and not has_bias and not weight.requires_grad


def _is_aligned(weight: Tensor) -> bool:
    # Rows that do not begin at multiples of 16 bytes have other algorithms than the heuristic is asked for.
    return weight.data_ptr() % _ALIGNMENT == 0 and all(size % 8 == 0 for size in weight.shape)


def _multiply_wide(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _time(candidates: Sequence[Multiply], num_tokens: int, weights: Sequence[Tensor]) -> list[float]:
    """Return the seconds of one product by each candidate: medians of replays that take turns."""
    device = weights[0].device
    x = torch.randn(num_tokens, weights[0].shape[1], dtype=weights[0].dtype, device=device)
    num_calls = min(max(_MIN_CALLS, _REPLAY_BYTES // weights[0].nbytes), _MAX_CALLS)
    in_turn = [*weights] * -(-num_calls // len(weights))
    memory_pool = torch.cuda.graph_pool_handle()  # all answers go to the same memory
    current = torch.cuda.current_stream(device)
    # Nothing is captured on the default stream; each further stream costs cuBLAS a workspace of its own.
    is_default = current == torch.cuda.default_stream(device)
    stream = torch.cuda.Stream(device) if is_default else current  # type: ignore[no-untyped-call]

    def record(multiply: Multiply) -> torch.cuda.CUDAGraph:
        multiply(x, weights[0])  # sets up what must not be set up while a graph is captured
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # By thread: another one may be loading a draft meanwhile.
        graph.capture_begin(pool=memory_pool, capture_error_mode="thread_local")
        try:
            for weight in in_turn:
                multiply(x, weight)
        finally:
            graph.capture_end()
        graph.replay()
        return graph

    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graphs = [record(multiply) for multiply in candidates]
        times = [[_seconds(graph) for graph in graphs] for _ in range(_NUM_ROUNDS)]
    current.wait_stream(stream)
    return [statistics.median(found) / len(in_turn) for found in zip(*times, strict=True)]


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
