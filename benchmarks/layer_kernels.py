"""What the work between matrix products costs on a CUDA device: kernels beside torch ops, in CUDA graphs.

Microseconds a call, medians of replays; "layers" is a whole layer without its attention, where "products" are
its four matrix products alone; "MLP" is the two products of the MLP by the bits of its weights. Run: python
benchmarks/layer_kernels.py [smollm2 | 8b ...]
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from engine.kernels.commit import commit_rows
from engine.kernels.quantize import quantize_rows
from engine.layers.decoder import DecoderLayer, LayerShape
from engine.layers.fp8_linear import Fp8Linear
from engine.layers.int4_linear import Int4Linear
from engine.layers.norm import RMSNorm
from engine.layers.ops import LayerOps, TorchOps
from engine.layers.rotary import Angles, Rotary
from engine.layers.triton_ops import TritonOps

EPS = 1e-5
SHAPES = {
    "smollm2": (30, LayerShape(576, 1536, 9, 3, 64, EPS, 576)),
    "8b": (12, LayerShape(4096, 14336, 32, 8, 128, EPS, 4096)),
    "70b": (4, LayerShape(8192, 28672, 64, 8, 128, EPS, 8192)),
}
NUM_TOKENS = (1, 4, 64, 256, 1024)
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")


def microseconds(work: Callable[[], object], num_calls: int) -> float:
    """Return the median time of one of `num_calls` calls of `work` inside a graph."""
    for _ in range(2):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [work() for _ in range(num_calls)]
    times = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / num_calls)
    del kept
    return float(statistics.median(times[5:]))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


class Layers:
    """Decoder layers with their norms, and one pass over T tokens that skips attention itself."""

    def __init__(self, num_layers: int, shape: LayerShape) -> None:
        self.shape = shape
        self.layers = [DecoderLayer(shape).to(DEVICE, DTYPE).requires_grad_(False) for _ in range(num_layers)]
        self.norm = RMSNorm(shape.hidden_size, EPS).to(DEVICE, DTYPE).requires_grad_(False)
        self.rotary = Rotary(shape.head_dim, 500000.0, None, 4096, DTYPE).to(DEVICE)

    def angles(self, num_tokens: int) -> Angles:
        angles: Angles = self.rotary(torch.arange(num_tokens, device=DEVICE))
        return angles

    def products(self, x: Tensor, attended: Tensor, gated: Tensor) -> None:
        """Multiply with every weight of the layers, and nothing else."""
        for layer in self.layers:
            layer.qkv_proj(x)
            layer.o_proj(attended)
            layer.gate_up_proj(x)
            layer.down_proj(gated)

    def run(self, ops: LayerOps, x: Tensor, attended: Tensor, angles: Angles, kv: Tensor) -> None:
        """Run everything but attention, whose answer is `attended`."""

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            del layer_idx  # every layer writes the same rows
            ops.rope_store(qkv, angles, *kv)
            return attended

        residual = x
        for layer_idx, layer in enumerate(self.layers):
            delta, residual = layer.forward(x, residual, angles, attend, layer_idx, ops)
            x, residual = ops.add_norm(delta, residual, self.norm.weight, EPS)


def choose_overlap() -> bool:
    return torch.cuda.get_device_capability()[0] >= 9


def choose_ops() -> dict[str, LayerOps]:
    ops: dict[str, LayerOps] = {"torch": TorchOps(), "triton": TritonOps(overlap=False)}
    if choose_overlap():
        ops["overlap"] = TritonOps(overlap=True)
    return ops


def op_calls(layers: Layers, num_tokens: int) -> dict[str, Callable[[LayerOps], object]]:
    """Return each op on inputs of its real shape."""
    shape = layers.shape
    hidden, kv_heads, head_dim = shape.hidden_size, shape.num_kv_heads, shape.head_dim
    x, delta, weight = draw(num_tokens, hidden), draw(num_tokens, hidden), draw(hidden)
    gate_up = draw(num_tokens, 2 * shape.intermediate_size)
    qkv = draw(num_tokens, shape.num_heads + 2 * kv_heads, head_dim)
    kv, angles = draw(2, 4096, kv_heads, head_dim), layers.angles(num_tokens)
    token_ids = torch.arange(num_tokens, device=DEVICE)
    dest_idx = torch.randperm(4096, device=DEVICE)[:num_tokens]
    float8 = kv.to(torch.float8_e4m3fn)
    scales = torch.ones(kv_heads, device=DEVICE), torch.ones(kv_heads, device=DEVICE)
    return {
        "norm": lambda ops: ops.norm(x, weight, EPS),
        "add_norm": lambda ops: ops.add_norm(delta, x, weight, EPS),
        "embed": lambda ops: ops.embed(token_ids, token_ids, x, layers.rotary.table, weight, EPS),
        "silu_mul": lambda ops: ops.silu_mul(gate_up),
        "rope_store": lambda ops: ops.rope_store(qkv, angles, kv[0], kv[1], dest_idx),
        "rope_store fp8": lambda ops: ops.rope_store(qkv, angles, float8[0], float8[1], dest_idx, scales),
    }


def time_ops(layers: Layers) -> None:
    ops = choose_ops()
    for num_tokens in NUM_TOKENS:
        for name, call in op_calls(layers, num_tokens).items():
            times = [microseconds(partial(call, one), 40) for one in ops.values()]
            print(f"{name:16s} T {num_tokens:5d} " + " ".join(f"{time:9.2f}" for time in times))


def time_layers(layers: Layers) -> None:
    shape = layers.shape
    for num_tokens in NUM_TOKENS:
        x, attended = draw(num_tokens, shape.hidden_size), draw(num_tokens, shape.num_heads, shape.head_dim)
        kv, angles = draw(2, num_tokens, shape.num_kv_heads, shape.head_dim), layers.angles(num_tokens)
        gated = draw(num_tokens, shape.intermediate_size)
        products = partial(layers.products, x, attended.flatten(1), gated)
        works = [partial(layers.run, one, x, attended, angles, kv) for one in choose_ops().values()]
        times = [microseconds(work, 2) / len(layers.layers) for work in (*works, products)]
        print(f"{'layers':16s} T {num_tokens:5d} " + " ".join(f"{time:9.2f}" for time in times) + " products")


def time_commit(num_layers: int, shape: LayerShape) -> None:
    """Time the move of 4 accepted rows of each of 64 sequences, all layers at once."""
    kv_shape = shape.num_kv_heads, shape.head_dim
    scratch, pages = draw(2, num_layers, 512, *kv_shape), draw(2, num_layers, 8192, *kv_shape)
    src, dest = (torch.randperm(512, device=DEVICE)[:256] + offset for offset in (0, 16))

    def gather_and_copy() -> None:
        for kept, store in zip(scratch, pages, strict=True):
            store.index_copy_(1, dest, kept.index_select(1, src))

    times = (
        microseconds(gather_and_copy, 10),
        microseconds(lambda: commit_rows(*scratch, src, *pages, dest), 10),
    )
    print(
        f"{'commit':16s} R {256:5d} " + " ".join(f"{time:9.2f}" for time in times) + f" {num_layers} layers"
    )


def time_linears(num_layers: int, shape: LayerShape) -> None:
    """Time the MLP's two products in bfloat16, float8 and four bits, over weights that no cache holds."""
    sizes = ((2 * shape.intermediate_size, shape.hidden_size), (shape.hidden_size, shape.intermediate_size))
    weights = [draw(*size) for _ in range(num_layers) for size in sizes]
    kinds: dict[str, Callable[[Tensor], nn.Module]] = {
        "bfloat16": _plain,
        "float8": partial(Fp8Linear, quantize_rows=partial(quantize_rows, overlap=choose_overlap())),
        "four bits": Int4Linear,
    }
    for name, make in kinds.items():
        modules = [make(weight) for weight in weights]
        for num_tokens in NUM_TOKENS:
            inputs = {size[1]: draw(num_tokens, size[1]) for size in sizes}

            def work(modules: list[nn.Module] = modules, inputs: dict[int, Tensor] = inputs) -> None:
                for module, weight in zip(modules, weights, strict=True):
                    module(inputs[weight.shape[1]])

            time = microseconds(work, 2) / num_layers
            print(f"MLP {name:12s} T {num_tokens:5d} {time:9.2f}")


def _plain(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", help=f"of {', '.join(SHAPES)}; smollm2 and 8b by default")
    models = parser.parse_args().models
    # Not `choices`: argparse of Python 3.11 holds no name at all against them, too.
    if unknown := set(models) - set(SHAPES):
        parser.error(f"no model is called {', '.join(sorted(unknown))}: there are {', '.join(SHAPES)}")
    for name in models or ("smollm2", "8b"):
        num_layers, shape = SHAPES[name]
        print(f"{name}, us a call: " + ", ".join(choose_ops()))
        layers = Layers(num_layers, shape)
        time_ops(layers)
        time_layers(layers)
        time_commit(num_layers, shape)
        time_linears(num_layers, shape)


if __name__ == "__main__":
    main()
