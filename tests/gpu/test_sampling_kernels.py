"""The kernels of verification and of draft top-k against their torch forms.

On a CUDA device with full vocabularies; in Triton's interpreter (TRITON_INTERPRET=1) with small ones.
"""

import dataclasses
import itertools
import random

import pytest
import torch
from torch import Tensor

from engine.sampling.noise import Stream, philox
from engine.sampling.verify import verify
from engine.speculation import DraftOutput, SamplingTensors, TreeTensors, Verification
from engine.tree.topology import TreeTopology, chain, root_only
from tests.sampling.cases import WIDE, on_device, sampling_tensors, target_probs
from tests.sampling.laws import law_p_value

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from engine.kernels.gumbel import gumbel, gumbel_bound, random_words  # noqa: E402
from engine.kernels.sampling import verify_drafts  # noqa: E402
from engine.kernels.topk import top_k  # noqa: E402
from engine.sampling.triton_verify import TritonVerify  # noqa: E402

pytestmark = pytest.mark.gpu

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
VOCAB_SIZES = (5, 4097, 49_152, 128_256) if ON_GPU else (5, 1501)
NUM_ROWS = 24 if ON_GPU else 4
# Launches of one call overlap where the chip can.
OVERLAP = ON_GPU and torch.cuda.get_device_capability()[0] >= 9
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="many draws or CUDA graphs")

# Fields of `sampling_tensors`, per row where they are lists; cycled over the rows.
SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": [0.8, 0.0, 1.5]},
    "top-k": {"temperature": [0.8, 1.5, 0.0], "top_k": [3, 40, 0, 1, 700]},
    "top-p": {"temperature": [0.8, 1.5, 1.0], "top_p": [0.9, 0.5, 1.0, 0.999, 1e-6]},
    "min-p": {"temperature": [0.8, 0.0], "min_p": [0.1, 0.0, 1.0]},
    "all": {
        "temperature": [0.8, 1.5, 0.0, 30.0],
        "top_k": [0, 50, 5, 900],
        "top_p": [0.9, 0.7, 1.0, 0.3, 0.95],
        "min_p": [0.0, 0.05, 0.0],
    },
}


def random_logits(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape, generator=generator) * 3
    if kind == "ties":
        logits = logits.round()
        logits = torch.where((logits == 0) & (torch.rand(shape, generator=generator) < 0.5), -0.0, logits)
        logits[0] = 1.5
    if kind == "masked":
        logits[torch.rand(shape, generator=generator) < 0.4] = -torch.inf
        logits[..., 1] = 0.25
    if kind == "peaked":
        logits = logits * 4 + 20
    return logits.to(dtype).to(DEVICE)


def random_topology(rng: random.Random) -> TreeTopology:
    parents = sorted(min(rng.randrange(node), 4) for node in range(1, rng.randint(1, 10)))
    return TreeTopology("random", (-1, *(min(parent, i) for i, parent in enumerate(parents))))


def sampling_of(setting: str, num_rows: int, vocab_size: int, **more: object) -> SamplingTensors:
    def row_values(value: object) -> object:
        return list(itertools.islice(itertools.cycle(value), num_rows)) if isinstance(value, list) else value

    fields = {name: row_values(value) for name, value in SETTINGS[setting].items()}
    if "top_k" in fields:
        fields["top_k"] = [min(k, vocab_size) for k in fields["top_k"]]
    seeds = torch.arange(num_rows) * 7919 - 5 * 2**33
    return on_device(sampling_tensors(num_rows, vocab_size, seed=seeds, **fields, **more), DEVICE)


def likely_drafts(
    logits: Tensor, tree: TreeTensors, sampling: SamplingTensors, root_positions: Tensor, rng: random.Random
) -> DraftOutput:
    """Draft for most nodes what the target draws at their parent, so that paths are long."""
    num_rows, num_nodes, vocab_size = logits.shape
    alone = TreeTensors.build((root_only(),) * num_rows, 1, torch.device(DEVICE))
    nothing = DraftOutput(torch.zeros(num_rows, 1, dtype=torch.int64, device=DEVICE))
    drawn = torch.zeros(num_rows, num_nodes, dtype=torch.int64)
    for node in range(num_nodes):
        positions = root_positions + tree.depths[:, node]
        answer = verify(logits[:, node : node + 1], nothing, alone, sampling, positions)
        drawn[:, node] = answer.next_token.cpu()
    tokens = torch.full((num_rows, num_nodes), -1, dtype=torch.int64)
    parents, is_node = tree.parents.cpu(), tree.is_node.cpu()
    for row, node in itertools.product(range(num_rows), range(num_nodes)):
        if is_node[row, node]:
            likely = int(drawn[row, parents[row, node]])
            tokens[row, node] = likely if rng.random() < 0.6 else rng.randrange(vocab_size)
    return DraftOutput(tokens.to(DEVICE))


def assert_same(found: Verification, expected: Verification) -> None:
    for field in dataclasses.fields(Verification):
        left, right = getattr(found, field.name), getattr(expected, field.name)
        assert (left.dtype, left.shape) == (right.dtype, right.shape), field.name
        assert torch.equal(left, right), field.name


def random_case(
    kind: str, setting: str, vocab_size: int, dtype: torch.dtype, num_rows: int = NUM_ROWS, **more: object
) -> tuple[Tensor, DraftOutput, TreeTensors, SamplingTensors, Tensor]:
    rng = random.Random(f"{kind} {setting} {vocab_size}")
    topologies = [random_topology(rng) for _ in range(num_rows)]
    topologies[:3] = [chain(3), WIDE, root_only()][:num_rows]
    num_nodes = max(t.num_nodes for t in topologies) + 1
    tree = TreeTensors.build(tuple(topologies), num_nodes, torch.device(DEVICE))
    logits = random_logits(kind, (num_rows, num_nodes, vocab_size), dtype, vocab_size)
    sampling = sampling_of(setting, num_rows, vocab_size, **more)
    root_positions = torch.arange(num_rows, device=DEVICE) * 2**31 + 100
    draft = likely_drafts(logits, tree, sampling, root_positions, rng)
    # Padding holds no numbers that anyone may read.
    logits[~tree.is_node] = torch.nan
    return logits, draft, tree, sampling, root_positions


@pytest.mark.parametrize("is_every_node", [True, False], ids=["nodes", "levels"])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_verification_equals_the_plain_form(setting: str, vocab_size: int, is_every_node: bool) -> None:
    case = random_case("random", setting, vocab_size, torch.bfloat16)
    expected = verify(*case)
    assert expected.num_accepted.sum() > 0
    assert_same(
        verify_drafts(*case, stream=Stream.TARGET, overlap=OVERLAP, is_every_node=is_every_node), expected
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("setting", ["greedy", "all"])
@pytest.mark.parametrize("kind", ["ties", "masked", "peaked"])
def test_verification_equals_the_plain_form_on_edges(kind: str, setting: str, dtype: torch.dtype) -> None:
    case = random_case(kind, setting, VOCAB_SIZES[1], dtype)
    found = verify_drafts(*case, stream=Stream.TARGET, overlap=OVERLAP, is_every_node=True)
    assert_same(found, verify(*case))


def test_rows_do_not_depend_on_their_batch() -> None:
    logits, draft, tree, sampling, positions = random_case("random", "all", VOCAB_SIZES[-1], torch.bfloat16)
    whole = verify_drafts(logits, draft, tree, sampling, positions, stream=Stream.TARGET, overlap=OVERLAP)
    for row in range(0, len(logits), 5):
        only = slice(row, row + 1)

        def cut(value: object, only: slice = only) -> object:
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            cuts = {name: item[only] for name, item in fields.items() if isinstance(item, Tensor)}
            return dataclasses.replace(value, **cuts)

        alone = verify_drafts(
            *(logits[only], cut(draft), cut(tree), cut(sampling), positions[only]),
            stream=Stream.TARGET,
            overlap=OVERLAP,
        )
        assert_same(alone, cut(whole))


@pytest.mark.parametrize("is_every_node", [True, False], ids=["nodes", "levels"])
@pytest.mark.parametrize("setting", ["greedy", "sampled", "all"])
@pytest.mark.parametrize("fault", ["nan", "-nan", "inf", "all -inf"])
def test_faults_accept_nothing_and_spare_their_neighbours(
    fault: str, setting: str, is_every_node: bool
) -> None:
    logits, draft, tree, sampling, positions = random_case("peaked", setting, 1100, torch.bfloat16)
    clean = verify(logits, draft, tree, sampling, positions)
    row = int(clean.num_accepted.argmax())
    node = int(clean.path[row, -1])
    assert node > 0
    if fault == "all -inf":
        logits[row, node] = -torch.inf
    else:
        logits[row, node, 1030] = float(fault)
    case = (logits, draft, tree, sampling, positions)
    found = verify_drafts(*case, stream=Stream.TARGET, overlap=OVERLAP, is_every_node=is_every_node)
    assert not found.is_finite[row]
    assert found.is_finite.sum() == len(logits) - 1
    assert_same(found, verify(*case))


@pytest.mark.parametrize("setting", ["greedy", "all"])
def test_penalties_bias_and_minimum_length_equal_the_plain_form(setting: str) -> None:
    vocab_size = VOCAB_SIZES[1]
    generator = torch.Generator().manual_seed(3)
    case = random_case(
        *("random", setting, vocab_size, torch.bfloat16),
        frequency_penalty=0.7,
        repetition_penalty=1.2,
        prompt=torch.rand(NUM_ROWS, vocab_size, generator=generator) < 0.1,
        bias=((3, 4.0), (7, -2.0)),
        stop_token_ids=(2, 3),
        stop_from=2**40,
    )
    found = TritonVerify(overlap=OVERLAP)(*case)
    assert_same(found, verify(*case))
    assert found.num_accepted.sum() > 0


def test_strided_inputs_are_read_as_they_lie() -> None:
    logits, draft, tree, sampling, positions = random_case("random", "all", 1030, torch.bfloat16)
    wide = torch.full((*logits.shape, 2), torch.nan, dtype=logits.dtype, device=DEVICE)
    wide[..., 0] = logits
    numbers = torch.stack((sampling.temperature, sampling.top_p, sampling.min_p), 1)
    strided = dataclasses.replace(
        sampling, temperature=numbers[:, 0], top_p=numbers[:, 1], min_p=numbers[:, 2]
    )
    tokens = torch.nn.functional.pad(draft.token_ids, (0, 1), value=3)[:, :-1]
    case = (wide[..., 0], DraftOutput(tokens), tree, strided, torch.stack((positions, -positions), 1)[:, 0])
    expected = verify(logits, draft, tree, sampling, positions)
    assert_same(verify_drafts(*case, stream=Stream.TARGET, overlap=OVERLAP), expected)


@triton.jit
def _words_kernel(out_ptr, numbers_ptr, STREAM: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    call_idx = tl.arange(0, BLOCK)
    words = random_words(call_idx, STREAM, tl.load(numbers_ptr), tl.load(numbers_ptr + 1))
    tl.store(out_ptr + call_idx[:, None] * 4 + tl.arange(0, 4)[None, :], words.to(tl.int64))


@pytest.mark.parametrize("stream", [Stream.TARGET, Stream.ACCEPT])
@pytest.mark.parametrize(("position", "seed"), [(2**35 + 9, -5), (2**31, 2**62 + 12345)])
def test_words_equal_those_of_the_plain_form(position: int, seed: int, stream: Stream) -> None:
    words = torch.zeros(256, 4, dtype=torch.int64, device=DEVICE)
    numbers = torch.tensor([position, seed], device=DEVICE)
    _words_kernel[(1,)](words, numbers, STREAM=int(stream), BLOCK=256)

    def word(value: int) -> Tensor:
        return torch.tensor([value & 0xFFFFFFFF])

    counter = (torch.arange(256), word(stream), word(position), word(position >> 32))
    expected = torch.stack(philox(counter, (word(seed), word(seed >> 32))), 1)
    assert torch.equal(words.cpu(), expected)


@triton.jit
def _gumbel_kernel(v_ptr, noise_ptr, bound_ptr, BLOCK: tl.constexpr):  # noqa: N803
    idx = tl.arange(0, BLOCK)
    v = tl.load(v_ptr + idx)
    tl.store(noise_ptr + idx, gumbel(v))
    tl.store(bound_ptr + idx, gumbel_bound(v))


def test_noise_is_exact_and_under_its_bound() -> None:
    words = torch.randint(0, 2**32, (4096,), generator=torch.Generator().manual_seed(1))
    words[:40] = torch.cat((torch.arange(8), 2 ** torch.arange(4, 28), 2**32 - 2 ** torch.arange(8)))
    v = ((words.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24).to(DEVICE)
    noise, bound = torch.empty_like(v), torch.empty_like(v)
    _gumbel_kernel[(1,)](v, noise, bound, BLOCK=4096)
    exact = -(-torch.log1p(-v.double())).log()
    torch.testing.assert_close(noise.double(), exact, rtol=3e-7, atol=3e-7)
    assert (bound >= noise).all()
    # Tight where draws are won.
    assert (bound - noise)[v < 1e-3].max() < 0.07


@needs_gpu
@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.8},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 4, "min_p": 0.1},
    ],
    ids=str,
)
def test_draws_follow_the_law(setting: dict[str, float]) -> None:
    num_draws, vocab_size = 1 << 17, 12
    row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(4)).bfloat16()
    sampling = on_device(
        sampling_tensors(num_draws, vocab_size, seed=torch.arange(num_draws), **setting), DEVICE
    )
    answer = verify_drafts(
        row.to(DEVICE).expand(num_draws, 1, vocab_size),
        DraftOutput(torch.zeros(num_draws, 1, dtype=torch.int64, device=DEVICE)),
        TreeTensors.build((root_only(),) * num_draws, 1, torch.device(DEVICE)),
        sampling,
        torch.full((num_draws,), 9, device=DEVICE),
        stream=Stream.TARGET,
        overlap=OVERLAP,
    )
    counts = torch.bincount(answer.next_token.cpu(), minlength=vocab_size)[None]
    assert law_p_value(counts, target_probs(row[None].float(), **setting)) > 1e-4
    wrong = {**setting, "temperature": setting["temperature"] * 1.05}
    assert law_p_value(counts, target_probs(row[None].float(), **wrong)) < 1e-4


@needs_gpu
@pytest.mark.parametrize("is_every_node", [True, False], ids=["nodes", "levels"])
@pytest.mark.parametrize("setting", ["greedy", "sampled", "all"])
def test_replay_reads_what_changed_since_the_capture(setting: str, is_every_node: bool) -> None:
    case = random_case("random", setting, 49_152, torch.bfloat16)
    options = {"stream": Stream.TARGET, "overlap": OVERLAP, "is_every_node": is_every_node}
    verify_drafts(*case, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = verify_drafts(*case, **options)
    for shift in range(3):
        logits, draft, tree, sampling, positions = case
        logits.copy_(random_logits("random", tuple(logits.shape), logits.dtype, shift))
        positions += 1
        likely = likely_drafts(logits, tree, sampling, positions, random.Random(shift))
        draft.token_ids.copy_(likely.token_ids)
        graph.replay()
        assert_same(answer, verify(*case))
        assert answer.num_accepted.sum() > 0


@needs_gpu
@pytest.mark.parametrize("setting", ["sampled", "all"])
@pytest.mark.parametrize("num_rows", [1, 64, 256])
def test_large_batches_equal_the_plain_form(num_rows: int, setting: str) -> None:
    tree = TreeTensors.build((chain(1),) * num_rows, 2, torch.device(DEVICE))
    logits = random_logits("peaked", (num_rows, 2, 128_256), torch.bfloat16, num_rows)
    sampling = sampling_of(setting, num_rows, 128_256)
    positions = torch.arange(num_rows, device=DEVICE)
    draft = likely_drafts(logits, tree, sampling, positions, random.Random(1))
    case = (logits, draft, tree, sampling, positions)
    assert_same(verify_drafts(*case, stream=Stream.TARGET, overlap=OVERLAP), verify(*case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "ties", "masked"])
@pytest.mark.parametrize("k", [1, 3, 10, 16])
def test_top_k_equals_a_stable_sort(k: int, kind: str, dtype: torch.dtype) -> None:
    for num_rows, vocab_size in (
        ((1, 32_000), (97, 12_288), (256, 32_000)) if ON_GPU else ((2, 2500), (3, 17))
    ):
        logits = random_logits(kind, (num_rows, vocab_size), dtype, k)
        expected = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(top_k(logits, k, overlap=OVERLAP), expected)
        wide = torch.stack((logits, logits.flip(1)), 2)
        assert torch.equal(top_k(wide[..., 0], k, overlap=OVERLAP), expected)


def test_top_k_above_the_kernels_limit_is_that_of_torch() -> None:
    logits = random_logits("random", (3, 900), torch.float32, 1)
    assert torch.equal(top_k(logits, 40), logits.topk(40).indices)
