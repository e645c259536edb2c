"""The walk along the accepted path: its answer, its edges, and what it must never do."""

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from engine.sampling import verify as verify_module
from engine.sampling.verify import verify
from engine.speculation import DraftOutput, TreeTensors, Verification
from engine.tree.topology import TreeTopology, chain, root_only
from tests.sampling.cases import WIDE, on_device, random_case, sampling_tensors

CPU = torch.device("cpu")


def random_topology(rng: random.Random) -> TreeTopology:
    parents = [rng.randrange(node) for node in range(1, rng.randint(1, 12))]
    return TreeTopology("random", (-1, *sorted(min(p, i) for i, p in enumerate(sorted(parents)))))


def drafted(topologies: tuple[TreeTopology, ...], tokens: list[list[int]], num_nodes: int) -> DraftOutput:
    rows = [row + [-1] * (num_nodes - len(row)) for row in tokens]
    return DraftOutput(torch.tensor(rows))


def greedy_walk(logits: Tensor, topology: TreeTopology, tokens: list[int]) -> tuple[list[int], list[int]]:
    """Return the path and the emitted tokens of one greedy row [N, V], step by step."""
    path, emitted = [0], []
    while True:
        row = logits[path[-1]].tolist()
        token = row.index(max(row))
        emitted.append(token)
        matches = [child for child in topology.children[path[-1]] if tokens[child] == token]
        if not matches:
            return path, emitted
        path.append(matches[0])


def same(left: Verification, right: Verification, rows: slice = slice(None)) -> bool:
    return all(
        torch.equal(getattr(left, field.name)[rows], getattr(right, field.name)[rows])
        for field in dataclasses.fields(Verification)
    )


@pytest.mark.parametrize("seed", range(6))
def test_greedy_rows_walk_as_one_row_at_a_time(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    topologies = (*(random_topology(rng) for _ in range(30)), root_only(), chain(4))
    num_nodes, vocab = 13, 3
    tokens = [[rng.randrange(vocab) for _ in range(t.num_nodes)] for t in topologies]
    logits = torch.randn(len(topologies), num_nodes, 2 * vocab, generator=generator).bfloat16()[..., ::2]
    tree = TreeTensors.build(topologies, num_nodes, CPU)
    sampling = sampling_tensors(len(topologies), vocab)
    answer = verify(logits, drafted(topologies, tokens, num_nodes), tree, sampling, torch.arange(32))
    assert answer.is_finite.all()
    width = tree.depth + 1
    lengths = set()
    for row, topology in enumerate(topologies):
        path, emitted = greedy_walk(logits[row], topology, tokens[row])
        lengths.add(len(path))
        assert answer.num_accepted[row] == len(path) - 1
        assert answer.next_token[row] == emitted[-1]
        assert answer.path[row].tolist() == path + [path[-1]] * (width - len(path))
        assert answer.token_ids[row].tolist() == emitted + [-1] * (width - len(emitted))
    assert len(lengths) >= 3


def oracle(topology: TreeTopology, path: list[int], vocab: int) -> tuple[Tensor, list[int]]:
    """Return logits [1, N, V] and draft tokens for which greedy verification takes `path` to its end."""
    logits = torch.zeros(1, topology.num_nodes, vocab)
    tokens = list(range(topology.num_nodes))
    for node, child in zip(path, [*path[1:], None], strict=True):
        logits[0, node, vocab - 1 if child is None else tokens[child]] = 5.0
    return logits, tokens


@pytest.mark.parametrize("path", [[0, 3, 7, 10], [0, 1, 5], [0, 2], [0]])
def test_last_siblings_are_reached(path: list[int]) -> None:
    logits, tokens = oracle(WIDE, path, 20)
    tree = TreeTensors.build((WIDE,), 16, CPU)
    padded = torch.full((1, 16, 20), torch.nan)
    padded[:, : WIDE.num_nodes] = logits
    draft = drafted((WIDE,), [tokens], 16)
    answer = verify(padded, draft, tree, sampling_tensors(1, 20), torch.tensor([4]))
    assert answer.path[0, : len(path)].tolist() == path
    assert answer.num_accepted.item() == len(path) - 1
    assert answer.next_token.item() == 19
    assert answer.is_finite.all()


def with_fault(logits: Tensor, row: int, node: int, fault: str) -> Tensor:
    logits = logits.clone()
    if fault == "all -inf":
        logits[row, node] = -torch.inf
    else:
        logits[row, node, 1] = float(fault)
    return logits


@pytest.mark.parametrize("mode", ["greedy", "sampled draws", "sampled drafts"])
@pytest.mark.parametrize("fault", ["nan", "-nan", "inf", "all -inf"])
def test_fault_on_the_path_accepts_nothing_and_spares_its_neighbours(fault: str, mode: str) -> None:
    path = [0, 3, 7, 10]
    logits, tokens = oracle(WIDE, path, 20)
    logits = logits.repeat(3, 1, 1) * 100
    tree = TreeTensors.build((WIDE,) * 3, WIDE.num_nodes, CPU)
    draft = drafted((WIDE,) * 3, [tokens] * 3, WIDE.num_nodes)
    if mode == "sampled drafts":
        draft = DraftOutput(draft.token_ids, torch.full((3, WIDE.num_nodes, 20), 0.05))
    temperature = 0.0 if mode == "greedy" else 1.0
    sampling = sampling_tensors(3, 20, temperature=temperature, top_p=0.9, top_k=5)
    clean = verify(logits, draft, tree, sampling, torch.tensor([4, 5, 6]))
    assert clean.num_accepted.tolist() == [3, 3, 3]
    for node in path:
        answer = verify(with_fault(logits, 1, node, fault), draft, tree, sampling, torch.tensor([4, 5, 6]))
        assert answer.is_finite.tolist() == [True, False, True]
        assert answer.num_accepted[1] == 0
        assert answer.next_token[1] == 0
        assert answer.path[1].tolist() == [0] * 4
        assert answer.token_ids[1].tolist() == [0, -1, -1, -1]
        assert same(answer, clean, slice(0, None, 2))
    # Off the path a fault is never read.
    assert same(
        verify(with_fault(logits, 1, 5, fault), draft, tree, sampling, torch.tensor([4, 5, 6])), clean
    )


def test_nan_in_the_draft_falls_back_to_the_target() -> None:
    logits, tokens = oracle(WIDE, [0, 3], 20)
    tree = TreeTensors.build((WIDE,), WIDE.num_nodes, CPU)
    draft = DraftOutput(
        drafted((WIDE,), [tokens], WIDE.num_nodes).token_ids, torch.full((1, 11, 20), torch.nan)
    )
    sampling = sampling_tensors(1, 20, temperature=1.0, seed=3)
    answer = verify(logits, draft, tree, sampling, torch.tensor([4]))
    plain = verify(
        logits[:, :1],
        DraftOutput(torch.zeros(1, 1, dtype=torch.int64)),
        TreeTensors.build((root_only(),), 1, CPU),
        sampling,
        torch.tensor([4]),
    )
    assert answer.is_finite.all()
    assert answer.num_accepted.item() == 0
    assert answer.next_token.item() == plain.next_token.item()


@pytest.mark.parametrize("is_sampled_draft", [False, True])
def test_missing_tokens_never_match(is_sampled_draft: bool) -> None:
    tree = TreeTensors.build((chain(2),), 4, CPU)
    probs = torch.full((1, 4, 5), 0.2) if is_sampled_draft else None
    logits = torch.zeros(1, 4, 5)
    logits[..., 0] = 50.0
    for temperature in (0.0, 1.0):
        sampling = sampling_tensors(1, 5, temperature=temperature)
        answer = verify(
            logits, DraftOutput(torch.tensor([[2, -1, -1, -1]]), probs), tree, sampling, torch.tensor([0])
        )
        assert answer.num_accepted.item() == 0
        assert answer.next_token.item() == 0


def test_duplicate_siblings_take_the_first() -> None:
    topology = TreeTopology("pair", (-1, 0, 0, 1, 2))
    logits = torch.zeros(1, 5, 6)
    logits[0, 0, 3] = logits[0, 1, 4] = logits[0, 2, 5] = logits[0, 3, 2] = 9.0
    answer = verify(
        logits,
        DraftOutput(torch.tensor([[0, 3, 3, 4, 5]])),
        TreeTensors.build((topology,), 5, CPU),
        sampling_tensors(1, 6),
        torch.tensor([0]),
    )
    assert answer.path.tolist() == [[0, 1, 3]]
    assert answer.token_ids.tolist() == [[3, 4, 2]]


def test_frequency_penalty_counts_the_path_within_one_step() -> None:
    depth, vocab = 5, 9
    topology = chain(depth)
    # Without the penalty every node would draw its favourite again: token 3, then 4, then 5...
    logits = -torch.arange(vocab).float().sub(3).abs()[None, None].repeat(2, depth + 1, 1) / 100
    order = logits[0, 0].argsort(descending=True, stable=True)[: depth + 1].tolist()
    sampling = sampling_tensors(2, vocab, frequency_penalty=[2.0, 0.0])
    tokens = torch.tensor([[0, *order[:depth]], [0] + [3] * depth])
    tree = TreeTensors.build((topology,) * 2, depth + 1, CPU)
    answer = verify(logits, DraftOutput(tokens), tree, sampling, torch.tensor([0, 0]))
    assert answer.token_ids[0].tolist() == order
    assert answer.token_ids[1].tolist() == [3] * (depth + 1)
    assert (sampling.output_counts == 0).all()


@pytest.mark.parametrize("num_before", [0, 2, 5])
def test_stop_token_waits_for_its_position(num_before: int) -> None:
    depth, vocab, stop = 4, 6, 2
    logits = torch.zeros(1, depth + 1, vocab)
    logits[..., stop], logits[..., 4] = 9.0, 5.0
    tokens = [4] * num_before + [stop] * (depth + 1 - num_before)
    root = 20
    sampling = sampling_tensors(1, vocab, stop_token_ids=(stop, -1), stop_from=root + 1 + num_before)
    tree = TreeTensors.build((chain(depth),), depth + 1, CPU)
    draft = DraftOutput(torch.tensor([[0, *tokens[:depth]]]))
    answer = verify(logits, draft, tree, sampling, torch.tensor([root]))
    assert answer.token_ids[0].tolist() == tokens


def test_greedy_rows_ignore_how_children_were_drawn() -> None:
    temperature = [0.0, 1.0] * 20
    answer = verify(*random_case("sampled drafts", temperature=temperature))
    expected = verify(*random_case("greedy", temperature=temperature))
    assert same(answer, expected, slice(0, None, 2))
    assert expected.num_accepted[0::2].sum() > 0
    assert not torch.equal(answer.token_ids, expected.token_ids)


def test_rows_without_children_draw_as_plain_decoding() -> None:
    case = random_case("sampled drafts", temperature=1.3, top_p=0.8)
    assert same(verify(*case), verify(*random_case("greedy", temperature=1.3, top_p=0.8)), slice(2, None, 4))


def test_zero_uniform_never_accepts_a_forbidden_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]])
    tree = TreeTensors.build((chain(1),), 2, CPU)
    sampling = sampling_tensors(1, 3, temperature=1.0, top_k=2)
    draft = DraftOutput(torch.tensor([[0, 2]]), torch.tensor([[[0.1, 0.1, 0.8]] * 2]))

    def num_accepted(value: float) -> int:
        monkeypatch.setattr(
            verify_module, "uniform", lambda seed, position, count, stream: torch.full((1, count), value)
        )
        return int(verify(logits, draft, tree, sampling, torch.tensor([0])).num_accepted)

    assert num_accepted(0.0) == 0
    # A number below 0 makes `<` read as `<=` at 0: the forbidden token passes, so the test can fail.
    assert num_accepted(-1e-30) == 1


def test_equal_laws_accept_every_draft() -> None:
    rows, vocab = 2000, 6
    logits = torch.randn(1, 2, vocab, generator=torch.Generator().manual_seed(5)).repeat(rows, 1, 1)
    tokens = torch.cat((torch.zeros(rows, 1), torch.arange(rows)[:, None] % vocab), 1).long()
    tree = TreeTensors.build((chain(1),) * rows, 2, CPU)
    sampling = sampling_tensors(rows, vocab, temperature=1.0, seed=torch.arange(rows))
    answer = verify(logits, DraftOutput(tokens, logits.softmax(-1)), tree, sampling, torch.zeros(rows).long())
    assert (answer.num_accepted == 1).all()


def test_an_empty_residual_falls_back_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    # A uniform number of 2 stands for the rounding that can reject although p equals q.
    monkeypatch.setattr(
        verify_module, "uniform", lambda seed, position, count, stream: torch.full((len(seed), count), 2.0)
    )
    logits = torch.tensor([[[2.0, -torch.inf, 1.0], [0.0, 0.0, 0.0]]]).repeat(200, 1, 1)
    tree = TreeTensors.build((chain(1),) * 200, 2, CPU)
    sampling = sampling_tensors(200, 3, temperature=1.0, seed=torch.arange(200))
    draft = DraftOutput(torch.zeros(200, 2, dtype=torch.int64), logits.softmax(-1))
    answer = verify(logits, draft, tree, sampling, torch.zeros(200, dtype=torch.int64))
    assert (answer.num_accepted == 0).all()
    assert answer.is_finite.all()
    assert set(answer.next_token.tolist()) == {0, 2}


@pytest.mark.parametrize("mode", ["greedy", "sampled drafts"])
def test_no_device_value_is_read_by_the_host(mode: str) -> None:
    case = random_case(
        mode,
        temperature=0.8,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        bias=((1, 1.0),),
        stop_token_ids=(2,),
        stop_from=5,
    )

    # Reading a value from the meta device raises.
    answer = verify(*on_device(case, "meta"))
    expected = verify(*case)
    for field in dataclasses.fields(Verification):
        left, right = getattr(answer, field.name), getattr(expected, field.name)
        assert (left.shape, left.dtype, left.device.type) == (right.shape, right.dtype, "meta")
