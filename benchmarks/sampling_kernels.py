"""Microseconds of verification and of draft top-k in CUDA graphs, beside their torch forms.

What the rest of a step costs is left to `eyas bench`.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels.sampling import verify_drafts
from engine.kernels.topk import top_k
from engine.sampling.noise import Stream
from engine.sampling.verify import verify
from engine.speculation import DraftOutput, SamplingTensors, TreeTensors
from engine.tree.topology import chain

DEVICE = torch.device("cuda")
MODES = {"greedy": (0.0, 1.0), "T=0.8": (0.8, 1.0), "T=0.8 p=0.9": (0.8, 0.9)}
ACCEPTANCE = 0.7


def measure(launch: Callable[[], object], num_replays: int = 30) -> float:
    """Return the median microseconds of `launch` in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(num_replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def sampling_tensors(num_rows: int, vocab_size: int, temperature: float, top_p: float) -> SamplingTensors:
    """Return rows that all draw alike, each from its own seed."""

    def column(value: float) -> Tensor:
        return torch.full((num_rows,), value, device=DEVICE)

    nothing = torch.empty(num_rows, 0, device=DEVICE)
    return SamplingTensors(
        temperature=column(temperature),
        top_k=torch.full((num_rows,), vocab_size, device=DEVICE),
        top_p=column(top_p),
        min_p=column(0.0),
        repetition_penalty=column(1.0),
        presence_penalty=column(0.0),
        frequency_penalty=column(0.0),
        seed=torch.arange(num_rows, device=DEVICE),
        bias_token_ids=nothing.long(),
        bias_values=nothing,
        prompt_mask=nothing.bool(),
        output_counts=nothing.int(),
        stop_token_ids=nothing.long(),
        stop_from=torch.zeros(num_rows, dtype=torch.int64, device=DEVICE),
        is_sampled=temperature > 0,
        is_truncated=top_p < 1,
        is_penalized=False,
        is_biased=False,
        has_min_tokens=False,
    )


def random_step(
    num_rows: int, vocab_size: int, depth: int, scale: float, mode: str
) -> tuple[Tensor, DraftOutput, TreeTensors, SamplingTensors, Tensor]:
    """Return a step over chains whose drafts are what the target draws, but for some chosen at random."""
    tree = TreeTensors.build((chain(depth),) * num_rows, depth + 1, DEVICE)
    logits = torch.empty(num_rows, depth + 1, vocab_size, dtype=torch.bfloat16, device=DEVICE)
    logits.normal_(std=scale)
    sampling = sampling_tensors(num_rows, vocab_size, *MODES[mode])
    positions = torch.full((num_rows,), 1000, device=DEVICE)
    tokens = torch.zeros(num_rows, depth + 1, dtype=torch.int64, device=DEVICE)
    draft = DraftOutput(tokens)
    for level in range(depth):
        answer = verify_drafts(logits, draft, tree, sampling, positions, stream=Stream.TARGET, overlap=True)
        tokens[:, level + 1] = answer.token_ids[:, level]
    is_missed = torch.rand(num_rows, depth + 1, device=DEVICE) > ACCEPTANCE
    is_missed[:, 0] = False
    tokens.masked_fill_(is_missed, vocab_size - 1)
    return logits, draft, tree, sampling, positions


def print_verification(num_rows: int, vocab_size: int, depth: int, scale: float, with_torch: bool) -> None:
    """Print one line: per mode the microseconds of all levels with every node drawn at once, level by level,
    and in torch.
    """
    cells = []
    for mode in MODES:
        case = random_step(num_rows, vocab_size, depth, scale, mode)
        times = [
            measure(
                lambda e=e, c=case: verify_drafts(*c, stream=Stream.TARGET, overlap=True, is_every_node=e)
            )
            for e in (True, False)
        ]
        plain = f"{measure(lambda c=case: verify(*c), 3):8.0f}" if with_torch else " " * 8
        cells.append(f"{times[0]:7.1f} {times[1]:7.1f} {plain}")
    print(f"{num_rows:4d} {vocab_size:7d} {depth:3d} {scale:5.1f} | " + " | ".join(cells), flush=True)


def main() -> None:
    """Print both tables."""
    start = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us for all depth + 1 levels")
    print("per mode: every node at once, level by level, torch")
    print("   B       V   D  sd   | " + " | ".join(f"{mode:>24s}" for mode in MODES))
    for vocab_size in (49_152, 128_256):
        for num_rows in (1, 8, 64, 256):
            for depth in (1, 3, 7):
                with_torch = depth == 1 and num_rows <= 64
                print_verification(num_rows, vocab_size, depth, 1.3, with_torch)
            print_verification(num_rows, vocab_size, 3, 5.0, with_torch=False)
    print("top-k, us: kernel, torch")
    for vocab_size in (12_288, 32_000):
        for num_rows in (1, 8, 64, 256, 1024):
            logits = torch.randn(num_rows, vocab_size, device=DEVICE).bfloat16()
            cells = [f"M {num_rows:4d} V {vocab_size}"]
            for k in (1, 4, 10):
                times = (
                    measure(lambda x=logits, k=k: top_k(x, k, overlap=True)),
                    measure(lambda x=logits, k=k: x.topk(k)),
                )
                cells.append(f"k={k} {times[0]:6.1f} {times[1]:7.1f}")
            print(" | ".join(cells))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
