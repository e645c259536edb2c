"""Times tree attention on a GPU beside xformers and beside a kernel that only reads the same bytes.

Every time is the median over replays of a CUDA graph that walks over K/V sets larger than the L2 cache. The
arithmetic is checked by `tests/gpu/test_tree_attention.py`.
"""

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.triton import can_overlap, processor_count
from engine.kernels.tree_attention import attend_tree
from engine.kernels.tree_attention_config import TreeConfig, TreeShape, choose_config
from engine.kernels.tree_attention_plan import make_plan

MODELS = {"llama-3.1-8b": (8, 4, 128), "smollm2": (3, 3, 64)}
GRID = "1x1024,1x8192,16x1024,16x8192,64x1024,64x8192"
OPERATORS = ("FwOp", *(f"FwOp_S{split}" for split in (1, 2, 4, 8, 16, 32)))
L2_BYTES = 60 * 2**20
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Shape:
    """One point: batch rows of `context` cached tokens and T query nodes each."""

    batch: int
    context: int
    num_nodes: int
    num_kv_heads: int
    group: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        return 4 * self.batch * self.context * self.num_kv_heads * self.head_dim


class Pages:
    """One pool of K and V in bfloat16, of which every set of a shape takes pages at random."""

    def __init__(self, num_tokens: int, shape: Shape, page: int, *, is_by_head: bool) -> None:
        num_blocks = num_tokens // page + 1
        sizes = (num_blocks, page, shape.num_kv_heads, shape.head_dim)
        if is_by_head:
            sizes = (num_blocks, shape.num_kv_heads, page, shape.head_dim)
        pool = [torch.empty(sizes, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(2)]
        self.flat = [x.view(-1) for x in pool]
        self.k, self.v = (x.transpose(1, 2) if is_by_head else x for x in pool)
        self.page, self.num_blocks = page, num_blocks

    def tables(self, shape: Shape) -> list[Tensor]:
        """Return block tables [B, P] of sets that share no page and together exceed the L2 cache."""
        per_row = -(-shape.context // self.page)
        per_set = shape.batch * per_row
        num_sets = min(self.num_blocks // per_set, max(2, -(-4 * L2_BYTES // shape.kv_bytes)))
        pages = torch.randperm(self.num_blocks, device=DEVICE)[: num_sets * per_set]
        return list(pages.view(num_sets, shape.batch, per_row))


def measure(calls: list[Callable[[], object]], repeats: int) -> float:
    """Return microseconds per call: the median over replays of one graph that holds every call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def repeated(calls: list[Callable[[], object]], shape: Shape) -> list[Callable[[], object]]:
    """Return the calls, over and over until they read about 8 GB or number 64."""
    count = min(64, max(len(calls), 8 * 10**9 // shape.kv_bytes))
    return list(itertools.islice(itertools.cycle(calls), count))


class Problem:
    """The tensors of a shape, without those of any backend."""

    def __init__(self, shape: Shape, pages: Pages) -> None:
        self.shape, self.pages, self.tables = shape, pages, pages.tables(shape)
        rows, nodes = shape.batch, shape.num_nodes
        heads, dim = shape.num_kv_heads, shape.head_dim
        packed = torch.randn(rows, nodes, heads * (shape.group + 2), dim, dtype=torch.bfloat16, device=DEVICE)
        self.q, self.k, self.v = packed.split((heads * shape.group, heads, heads), 2)
        ends = torch.full((rows, 1), shape.context, device=DEVICE)
        self.ends = ends.expand(rows, nodes)
        self.starts = torch.zeros_like(ends).expand(rows, nodes)
        self.mask = torch.ones(nodes, nodes, dtype=torch.bool, device=DEVICE).tril().repeat(rows, 1, 1)

    def config(self) -> TreeConfig:
        shape = self.shape
        limit = self.tables[0].shape[1] * self.pages.page
        tree = TreeShape(
            *(shape.batch, shape.num_nodes, shape.num_nodes, shape.num_kv_heads * shape.group),
            *(shape.num_kv_heads, shape.head_dim, limit, torch.bfloat16),
        )
        return choose_config(tree, processor_count(DEVICE))

    def calls(self, config: TreeConfig) -> list[Callable[[], object]]:
        """Return one call per set; the plan is made before, as once per pass."""
        limit = self.tables[0].shape[1] * self.pages.page
        plan = make_plan(self.starts, self.ends, self.mask, config=config, limit=limit)

        def call(tables: Tensor) -> Callable[[], object]:
            tensors = (self.q, self.k, self.v, self.pages.k, self.pages.v, tables, self.starts, self.ends)
            return lambda: attend_tree(*tensors, config=config, plan=plan, overlap=can_overlap(DEVICE))

        return [call(tables) for tables in self.tables]

    def plan_call(self, config: TreeConfig) -> list[Callable[[], object]]:
        limit = self.tables[0].shape[1] * self.pages.page
        return [lambda: make_plan(self.starts, self.ends, self.mask, config=config, limit=limit)] * 8


@triton.jit
def _read_kernel(  # noqa: ANN202
    k,  # noqa: ANN001
    v,  # noqa: ANN001
    out,  # noqa: ANN001
    begin,  # noqa: ANN001
    num_tiles,  # noqa: ANN001
    BLOCK: tl.constexpr,  # noqa: N803
):
    lane = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=1):
        offset = begin + tl.cast(tile, tl.int64) * BLOCK
        acc += tl.load(k + offset + lane).to(tl.float32) + tl.load(v + offset + lane).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(acc))


def ceiling(shape: Shape, pages: Pages, repeats: int) -> float:
    """Return the time of the fastest reader of as many bytes, contiguous, in sets as large."""
    size = shape.kv_bytes // 4
    num_sets = len(pages.tables(shape))
    out = torch.empty(1 << 16, device=DEVICE)
    best = float("inf")
    for block, warps, per_processor in (
        (4096, 8, 4),
        (4096, 8, 8),
        (8192, 8, 4),
        (2048, 4, 8),
        (16384, 8, 2),
    ):
        num_tiles = size // block
        grid = (min(num_tiles, per_processor * processor_count(DEVICE)),)

        def call(
            begin: int, block: int = block, warps: int = warps, n: int = num_tiles, g: object = grid
        ) -> object:
            return _read_kernel[g](*pages.flat, out, begin, n, BLOCK=block, num_warps=warps)

        calls = [lambda i=i, call=call: call(i * size) for i in range(num_sets)]
        best = min(best, measure(repeated(calls, shape), repeats))
    return best


def xformers_calls(
    problem: Problem, names: Sequence[str]
) -> Iterator[tuple[str, list[Callable[[], object]]]]:
    """Yield (ops, calls) of xformers' tree attention, each over contiguous K/V of the same size."""
    from xformers.ops import tree_attention as tree
    from xformers.ops.fmha import triton_splitk
    from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask

    shape = problem.shape
    heads, group, dim = shape.num_kv_heads, shape.group, shape.head_dim
    rows, nodes, context = shape.batch, shape.num_nodes, shape.context

    def grouped(x: Tensor) -> Tensor:
        return x.unsqueeze(3).expand(*x.shape[:3], group, dim)

    q = problem.q.reshape(rows, nodes, heads, group, dim)
    k, v = (grouped(x.contiguous()) for x in (problem.k, problem.v))
    hidden = torch.zeros(nodes, nodes, dtype=q.dtype, device=DEVICE).masked_fill_(
        ~problem.mask[0], -torch.inf
    )
    bias = BlockDiagonalPaddedKeysMask.from_seqlens([nodes] * rows, context, [context] * rows, device=DEVICE)
    size = rows * context * heads * dim
    sets = [
        [grouped(x[i * size : (i + 1) * size].view(rows, context, heads, dim)) for x in problem.pages.flat]
        for i in range(len(problem.tables))
    ]
    for name in names:
        prefix_op = getattr(triton_splitk, name, None)
        if prefix_op is None:
            continue

        def call(pair: list[Tensor], op: object = prefix_op) -> Callable[[], object]:
            return lambda: tree.tree_attention(
                q, k, v, *pair, hidden, bias, prefix_op=op, suffix_op=triton_splitk.FwOp
            )

        yield name, [call(pair) for pair in sets]


def time_xformers(problem: Problem, names: Sequence[str], repeats: int) -> tuple[float, str] | None:
    """Return (microseconds, ops) of the fastest choice of ops, None where none runs."""
    best: tuple[float, str] | None = None
    try:
        for name, calls in xformers_calls(problem, names):
            try:
                found = measure(repeated(calls, problem.shape), repeats), name
            except Exception as error:  # a hole in the table, whatever the library raises
                print(f"xformers {name}: {type(error).__name__}: {str(error)[:100]}")
                continue
            best = found if best is None or found < best else best
    except ImportError as error:
        print(f"xformers: {error}")
    return best


def candidates(base: TreeConfig, shape: Shape, options: argparse.Namespace) -> list[TreeConfig]:
    """Return the configurations of a sweep around `base`."""
    queries = shape.num_nodes * shape.group
    found = []
    blocks = [block for block in options.block_m if block < 2 * max(queries, 33)] or [base.block_m]
    grid = itertools.product(blocks, options.block_n, options.warps, options.stages, options.registers)
    for block_m, block_n, warps, stages, registers in grid:
        if block_m == 128 and warps < 8:
            continue
        if 4 * shape.head_dim * block_n * max(1, stages - 1) + 2 * shape.head_dim * block_m > 200_000:
            continue
        config = replace(
            base,
            block_m=block_m,
            block_n=block_n,
            num_warps=warps,
            num_stages=stages,
            max_registers=registers or None,
        )
        num_lanes = shape.num_kv_heads * triton.cdiv(queries, block_m)
        for programs, min_tiles, idle in itertools.product(options.programs, options.min_tiles, options.idle):
            slots = max(1, int(programs * processor_count(DEVICE)) // num_lanes)
            found.append(replace(config, num_slots=slots, min_tiles=min_tiles, idle_percent=idle))
    return list(dict.fromkeys(found))


def compile_all(problem: Problem, configs: list[TreeConfig]) -> list[TreeConfig]:
    """Compile in parallel, and return the configurations that the GPU bears."""

    def attempt(config: TreeConfig) -> bool:
        try:
            problem.calls(config)[0]()
        except Exception as error:  # too much shared memory, most often
            print(f"  not run: {config}: {str(error)[:80]}")
            return False
        return True

    def kind(config: TreeConfig) -> TreeConfig:
        return replace(config, num_slots=1, min_tiles=1, idle_percent=1)

    kinds = {kind(config): config for config in configs}
    with ThreadPoolExecutor(16) as pool:
        fine = dict(zip(kinds, pool.map(attempt, kinds.values()), strict=True))
    return [config for config in configs if fine[kind(config)]]


def sweep(problem: Problem, options: argparse.Namespace, read: float) -> dict[str, object]:
    """Time every candidate, print the best, and return them."""
    configs = candidates(problem.config(), problem.shape, options)
    begin = time.monotonic()
    configs = compile_all(problem, configs)
    print(f"  {len(configs)} configurations, compiled in {time.monotonic() - begin:.0f} s")
    timed = [
        (measure(repeated(problem.calls(config), problem.shape), options.repeats), config)
        for config in configs
    ]
    timed.sort(key=lambda pair: pair[0])
    for duration, config in timed[: options.top]:
        values = ",".join(f"{name.split('_')[-1]}={value}" for name, value in asdict(config).items())
        print(f"  {duration:8.1f} us {100 * read / duration:5.1f}%  {values}")
    return {"best": [[duration, asdict(config)] for duration, config in timed[: options.top]]}


def run_point(problem: Problem, options: argparse.Namespace) -> dict[str, object]:
    """Measure one shape and print its line."""
    shape = problem.shape
    read = ceiling(shape, problem.pages, options.repeats)
    config = problem.config()
    own = measure(repeated(problem.calls(config), shape), options.repeats)
    plan = measure(problem.plan_call(config), options.repeats)
    found: dict[str, object] = {**asdict(shape), "read_us": read, "triton_us": own, "plan_us": plan}
    found["config"] = asdict(config)
    other = None
    if options.xformers and time.monotonic() < options.deadline:
        other = time_xformers(problem, options.operators.get(shape, OPERATORS), options.repeats)
    line = f"{shape.batch:4d} x {shape.context:5d}  T={shape.num_nodes:2d}  {own:8.1f} us  read {read:7.1f}  "
    line += f"{100 * read / own:5.1f}%  {shape.kv_bytes / own / 1e6:5.2f} TB/s  plan {plan:4.1f}"
    if other is not None:
        found["xformers_us"], found["xformers_op"] = other
        line += f"  xformers {other[0]:8.1f}  {other[0] / own:5.2f}x ({other[1]})"
    print(line, flush=True)
    if options.sweep:
        found["sweep"] = sweep(problem, options, read)
    return found


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def fractions(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser.add_argument("--models", default="llama-3.1-8b,smollm2")
    parser.add_argument("--shapes", default=GRID, help="batch x context, comma-separated")
    parser.add_argument("--nodes", type=numbers, default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--by-head", action="store_true", help="pages as [num_blocks, Hkv, block_size, D]")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--xformers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--operators-of", type=Path, help="an earlier result: of xformers, only what was best there"
    )
    parser.add_argument("--seconds", type=float, default=130, help="no xformers point starts later")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--block-m", type=numbers, default=[16, 32, 64, 128])
    parser.add_argument("--block-n", type=numbers, default=[64, 128])
    parser.add_argument("--warps", type=numbers, default=[4])
    parser.add_argument("--stages", type=numbers, default=[3, 4])
    parser.add_argument("--registers", type=numbers, default=[0], help="bound per thread, 0 for none")
    parser.add_argument("--programs", type=fractions, default=[1, 2, 3], help="per multiprocessor")
    parser.add_argument("--min-tiles", type=numbers, default=[2], help="of a unit of work")
    parser.add_argument("--idle", type=numbers, default=[55], help="percent of time of a unit alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.operators = {}
    if options.operators_of is not None:
        names = [field.name for field in fields(Shape)]
        for point in json.loads(options.operators_of.read_text())["points"]:
            options.operators[Shape(*(point[name] for name in names))] = (point["xformers_op"],)
    options.deadline = time.monotonic() + options.seconds
    return options


def main() -> None:
    """Measure every point and write the results."""
    options = parse()
    points = []
    torch.manual_seed(0)
    for model in options.models.split(","):
        heads, group, dim = MODELS[model]
        sizes = [tuple(int(x) for x in text.split("x")) for text in options.shapes.split(",")]
        shapes = [Shape(*size, nodes, heads, group, dim) for size in sizes for nodes in options.nodes]
        tokens = max(
            max(2, -(-4 * L2_BYTES // s.kv_bytes)) * s.batch * max(s.context, options.page) for s in shapes
        )
        pages = Pages(tokens, shapes[0], options.page, is_by_head=options.by_head)
        print(f"{model}: {heads} K/V heads x {group}, head dim {dim}, bfloat16, page {options.page}")
        problems = [Problem(shape, pages) for shape in shapes]
        with ThreadPoolExecutor(16) as pool:  # compiles in parallel
            list(pool.map(lambda problem: problem.calls(problem.config())[0](), problems))
        points += [{"model": model, **run_point(problem, options)} for problem in problems]
        del pages, problems
        torch.cuda.empty_cache()
    ratios = [p["xformers_us"] / p["triton_us"] for p in points if "xformers_us" in p]
    if ratios:
        mean = statistics.geometric_mean(ratios)
        print(f"against xformers: geometric mean {mean:.2f}, least {min(ratios):.2f}")
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    if options.json:
        result = {"machine": {**machine, "python": platform.python_version()}, "page": options.page}
        options.json.write_text(
            json.dumps({**result, "by_head": options.by_head, "points": points}, indent=1)
        )


if __name__ == "__main__":
    main()
