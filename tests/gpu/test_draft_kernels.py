"""Opening a step, growing a tree and committing it by kernels equals the torch of the CPU, number by number.

They run on a GPU, or under TRITON_INTERPRET=1 on a CPU.
"""

import dataclasses
import random

import pytest
import torch

pytest.importorskip("triton")

from engine.draft.config import DraftConfig
from engine.draft.network import DraftNetwork, create_network
from engine.draft.ops import TorchDraftOps
from engine.draft.triton_ops import TritonDraftOps
from engine.layers.triton_ops import TritonOps
from engine.runner.slot_ops import TorchSlotOps
from engine.runner.slot_state import SlotState
from engine.runner.triton_slot_ops import TritonSlotOps
from engine.speculation import DraftOutput, TreeTensors, Verification
from engine.step_rows import AlignWindow, StepRows
from engine.tree.topology import TreeTopology, chain, root_only
from tests.exactness.head import build_drafter
from tests.exactness.tiny import EngineShape, build_engine, build_target, prompts, request_of, run

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Overlapped launches wait by an instruction that the interpreter lacks.
VARIANTS = [False, True] if DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] >= 9 else [False]
TORCH = TorchDraftOps()
VOCAB, BLOCK_SIZE, WINDOW, NUM_SLOTS = 700, 4, 7, 6
SMALL_TREES = (chain(3), TreeTopology("wide", (-1, 0, 0, 0, 1, 1, 3, 3, 6, 7, 7)), root_only(), chain(1))

in_variants = pytest.mark.parametrize("overlap", VARIANTS)


def random_tree(rng: random.Random, num_nodes: int) -> TreeTopology:
    parents = sorted(rng.randrange(max(1, node // 2)) for node in range(1, num_nodes))
    return TreeTopology(f"random-{parents}", (-1, *parents))


def trees_of(seed: int) -> tuple[TreeTopology, ...]:
    """Return mixed trees, one per row; with one seed they are all alike."""
    rng = random.Random(seed)
    if seed == 0:
        return (chain(3),) * 3
    drawn = [random_tree(rng, rng.choice([2, 5, 17, 64])) for _ in range(2)]
    return (*drawn, *rng.sample(SMALL_TREES, 2))


def padded(topologies: tuple[TreeTopology, ...], spare: int = 0) -> TreeTensors:
    most = max(topology.num_nodes for topology in topologies)
    return TreeTensors.build(topologies, min(64, most + spare), DEVICE)


def assert_last_place(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but for the last places of a norm; the interpreter cuts bfloat16 off where the chip rounds."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    tolerance = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def fields(value: object) -> dict[str, torch.Tensor | None]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


# --- whole steps


def run_engine(mode: str, slot_ops, draft_ops) -> tuple[dict[str, tuple[int, ...]], list[list[list[int]]]]:
    """Return what an engine emits and what it drafts, prompts of all lengths coming and going."""
    target = build_target().to(DEVICE)
    shape = EngineShape(mode=mode, feature_window=6, max_num_seqs=3)
    drafter = build_drafter(shape, target)
    drafter._ops = draft_ops
    drafts, draft = [], drafter.draft

    def watch(window, tree, noise, output):
        draft(window, tree, noise, output)
        drafts.append(output.token_ids.tolist())

    drafter.draft = watch
    engine = build_engine(target, drafter, shape)
    engine._runner._state._ops = slot_ops
    trees = ("auto", "off", "chain-2", "auto")
    asked = [
        request_of(f"r{idx}", prompt, 100 + idx, speculation=trees[idx], temperature=0.7, max_tokens=9)
        for idx, prompt in enumerate(prompts(4, length=1))
    ]
    return run(engine, asked), drafts


@in_variants
@pytest.mark.parametrize("mode", ["chain-3", "tree-8"])
def test_an_engine_drafts_and_emits_what_it_does_by_torch(overlap, mode):
    found = run_engine(mode, TritonSlotOps(overlap=overlap), TritonDraftOps(overlap=overlap))
    expected = run_engine(mode, TorchSlotOps(), TorchDraftOps())
    assert found == expected
    assert len(expected[1]) > 5


# --- slots


def make_state(ops, seed: int, feature_size: int, dtype: torch.dtype) -> SlotState:
    """Return slots in the middle of their texts: near the start, past the ring, with and without holes."""
    state = SlotState(
        num_slots=NUM_SLOTS,
        table_width=9,
        window=WINDOW,
        feature_size=feature_size,
        vocab_size=VOCAB,
        dtype=dtype,
        device=DEVICE,
        ops=ops,
    )
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    for slot in range(1, NUM_SLOTS):
        root = rng.choice([0, 1, 5, WINDOW, 20, 27])
        state.tables.seq_len[slot], state.tables.root_token[slot] = root, rng.randrange(VOCAB)
        state.tables.draft_len[slot] = max(0, root - rng.randrange(12))
        state.tables.draft_start[slot] = rng.randrange(int(state.tables.draft_len[slot]) + 1)
    state.tables.block_tables.copy_(
        torch.randint(1, 40, state.tables.block_tables.shape, generator=generator)
    )
    state.tables.block_tables[0] = 0
    state.tables.features.copy_(torch.randn(state.tables.features.shape, generator=generator))
    state.tables.tokens.copy_(torch.randint(0, VOCAB, state.tables.tokens.shape, generator=generator))
    state.tables.integers.copy_(torch.randint(0, 1 << 62, state.tables.integers.shape, generator=generator))
    state.tables.numbers.copy_(torch.rand(state.tables.numbers.shape, generator=generator))
    return state


def states(overlap: bool, seed: int, feature_size: int = 33, dtype: torch.dtype = torch.bfloat16):
    return [
        make_state(ops, seed, feature_size, dtype) for ops in (TritonSlotOps(overlap=overlap), TorchSlotOps())
    ]


def assert_same_state(found: SlotState, expected: SlotState) -> None:
    for name in ("seq_len", "root_token", "draft_len", "draft_start", "tokens", "features"):
        mine, other = getattr(found.tables, name)[1:], getattr(expected.tables, name)[1:]
        if name in ("tokens", "features"):
            mine, other = mine[:, :WINDOW], other[:, :WINDOW]  # behind the ring is what padding wrote
        assert torch.equal(mine, other), name
    assert found.tables.seq_len[0] == expected.tables.seq_len[0] == 0


def assert_same_rows(found: StepRows, expected: StepRows) -> None:
    for name in ("root_positions", "positions", "block_tables", "integers", "numbers"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.draft.token_ids, expected.draft.token_ids)
    assert torch.equal(found.draft.children, expected.draft.children)


@in_variants
@pytest.mark.parametrize("num_blocks", [1, 9])
@pytest.mark.parametrize("seed", range(3))
def test_opened_rows_are_those_of_torch(overlap, seed, num_blocks):
    tree = padded(trees_of(seed), spare=1)
    slots = torch.tensor([3, 1, 0, 0][: tree.num_rows], device=DEVICE)
    opened = []
    for state in states(overlap, seed):
        rows = StepRows.empty(tree, num_blocks, None)
        state.open(slots, tree, rows)
        opened.append(rows)
    assert_same_rows(*opened)


@in_variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1, 2, 4, WINDOW])
@pytest.mark.parametrize("seed", range(4))
def test_windows_are_those_of_torch_and_close_behind_holes(overlap, seed, width, dtype):
    tree = padded((chain(2),) * 6)
    slots = torch.tensor([5, 2, 0, 1, 4, 3], device=DEVICE)
    windows, opened = [], []
    both = states(overlap, seed, dtype=dtype)
    for state in both:
        rows = StepRows.empty(tree, 9, None)
        windows.append(state.align(slots, tree, rows, width))
        opened.append(rows)
    for name, found in fields(windows[0]).items():
        assert torch.equal(found, getattr(windows[1], name)), name
    assert_same_rows(*opened)
    assert_same_state(*both)


def verified(tree: TreeTensors, seed: int) -> Verification:
    """Return some accepted path of every row, and what it emits."""
    rng = random.Random(seed)
    paths, emitted, accepted = [], [], []
    for row in range(tree.num_rows):
        parents, is_node = tree.parents[row].tolist(), tree.is_node[row].tolist()
        path = [0]
        while children := [n for n in range(1, len(parents)) if is_node[n] and parents[n] == path[-1]]:
            if rng.random() < 0.3:
                break
            path.append(rng.choice(children))
        accepted.append(len(path) - 1)
        pad = tree.depth - accepted[-1]
        paths.append(path + path[-1:] * pad)
        emitted.append([rng.randrange(VOCAB) for _ in path] + [-1] * pad)
    token_ids, num_accepted = torch.tensor(emitted, device=DEVICE), torch.tensor(accepted, device=DEVICE)
    return Verification(
        path=torch.tensor(paths, device=DEVICE),
        num_accepted=num_accepted,
        next_token=token_ids.gather(1, num_accepted[:, None])[:, 0],
        token_ids=token_ids,
        is_finite=torch.tensor([rng.random() < 0.7 for _ in paths], device=DEVICE),
    )


def children_of(tree: TreeTensors, verification: Verification, num_ranks: int, seed: int) -> torch.Tensor:
    """Return children [B, N, num_ranks], none at some nodes; of the last node of each row, the token that was
    drawn is one, or none is.
    """
    rng = random.Random(seed)
    children = torch.randint(VOCAB, 2 * VOCAB, (*tree.parents.shape, num_ranks), device=DEVICE)
    for row in range(tree.num_rows):
        node, rank = int(verification.path[row, -1]), rng.randrange(-1, num_ranks + 1)
        if rank < 0:
            children[row, node] = -1
        elif rank < num_ranks:
            children[row, node, rank] = verification.next_token[row]
    return children


@in_variants
@pytest.mark.parametrize("feature_size", [0, 3, 4100])
@pytest.mark.parametrize(
    ("seed", "num_ranks"), [(0, 1), (1, 4), (2, 8), (3, 0), (4, 5)], ids=lambda value: str(value)
)
def test_committed_steps_are_those_of_torch(overlap, seed, num_ranks, feature_size):
    topologies = (*(t for t in trees_of(seed) if t.depth < WINDOW), chain(3), chain(3))
    tree = padded(topologies)
    slots = torch.tensor([2, 4, 1, 3, 0, 0][: tree.num_rows], device=DEVICE)
    verification = verified(tree, seed)
    features = torch.randn(
        tree.num_rows, tree.num_nodes, feature_size, generator=torch.Generator().manual_seed(seed)
    )
    features = features.bfloat16().to(DEVICE)
    both, committed = states(overlap, seed, feature_size), []
    for state in both:
        rows = StepRows.empty(tree, 9, None)
        state.open(slots, tree, rows)
        children = children_of(tree, verification, num_ranks, seed) if num_ranks else None
        rows = dataclasses.replace(rows, draft=dataclasses.replace(rows.draft, children=children))
        committed.append(state.commit(slots, rows, verification, features, BLOCK_SIZE, False))
    for name, found in fields(committed[0]).items():
        assert torch.equal(found, getattr(committed[1], name)), name
    assert_same_state(*both)


# --- drafts


KINDS = {
    "eagle3": {},
    "residual": {"is_residual_normed": True},
    "eagle1": {"style": "eagle1", "is_feedback_normed": False},
}


def make_head(dtype: torch.dtype, kind: str = "eagle3", hidden_size: int = 48) -> DraftNetwork:
    plain = DraftConfig(
        num_layers=1,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position=64,
        taps=(1,),
        target_hidden_size=hidden_size,
        target_vocab_size=VOCAB,
        target_num_layers=1,
        draft_vocab_size=500,
        is_feedback_normed=True,
    )
    generator = torch.Generator().manual_seed(1)
    head = create_network(dataclasses.replace(plain, **KINDS[kind]), num_positions=80, dtype=dtype)
    head.requires_grad_(False)
    for norm in head.pair_norms or ():
        norm.weight.copy_(torch.rand(norm.weight.shape, generator=generator) + 0.5)
    head.target_ids.copy_(torch.randperm(VOCAB, generator=generator)[:500])
    rows = torch.randn(VOCAB, hidden_size, generator=generator).to(dtype)
    head.to(DEVICE).bind(rows.to(DEVICE), rows.to(DEVICE))
    if DEVICE.type == "cuda":
        head.use(TritonOps(overlap=False))
    return head


def assert_same_pairs(found, expected, kind: str) -> None:
    assert_last_place(found.x, expected.x)
    assert_last_place(found.residual, expected.residual)
    if kind != "residual":
        assert torch.equal(found.residual, expected.residual)
    if kind == "eagle1":
        assert torch.equal(found.x, expected.x)
    for mine, other in zip(found.angles, expected.angles, strict=True):
        assert torch.equal(mine, other)


@in_variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "roots"), [(1, [0, 3]), (4, [2, 0, 30, 17]), (7, [9, 6, 1])])
def test_a_window_is_opened_as_by_torch(overlap, dtype, kind, width, roots):
    head = make_head(dtype, kind)
    generator = torch.Generator().manual_seed(width)
    root = torch.tensor(roots)[:, None]
    positions = root + torch.arange(1 - width, 1)
    num_pending = torch.randint(1, width + 1, root.shape, generator=generator).minimum(root + 1)
    window = AlignWindow(
        positions=positions.to(DEVICE),
        is_pending=(positions > root - num_pending).to(DEVICE),
        token_ids=torch.randint(0, VOCAB, positions.shape, generator=generator).to(DEVICE),
        features=torch.empty(0, device=DEVICE),
        prefix_start=torch.zeros(len(roots), dtype=torch.int64, device=DEVICE),
        prefix_end=(root - num_pending)[:, 0].to(DEVICE) + 1,
        block_tables=torch.randint(1, 40, (len(roots), 9), generator=generator).to(DEVICE),
    )
    fused = torch.randn(len(roots) * width, 48, generator=generator).to(DEVICE, dtype)
    found = TritonDraftOps(overlap=overlap).open_window(head, window, fused, BLOCK_SIZE)
    expected = TORCH.open_window(head, window, fused, BLOCK_SIZE)
    assert_same_pairs(found.pairs, expected.pairs, kind)
    for name in ("slots", "suffix_mask", "end"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def random_draft(tree: TreeTensors, num_children: int, generator: torch.Generator) -> DraftOutput:
    token_ids = torch.randint(0, VOCAB, tree.parents.shape, generator=generator).to(DEVICE)
    children = torch.full((*tree.parents.shape, num_children), -1, device=DEVICE)
    return DraftOutput(token_ids.masked_fill(~tree.is_node, -1), children=children)


@in_variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("kind", "seed"), [("eagle3", 0), ("eagle3", 1), ("residual", 2), ("eagle1", 3)])
def test_a_level_is_opened_as_by_torch(overlap, dtype, kind, seed):
    head, tree = make_head(dtype, kind), padded(trees_of(seed), spare=seed % 2)
    generator = torch.Generator().manual_seed(seed)
    draft = random_draft(tree, tree.max_rank + 1, generator)
    end = torch.randint(1, 60, (tree.num_rows,), generator=generator).to(DEVICE)
    for depth in range(1, tree.depth):
        num_above = tree.widths[depth - 2] if depth > 1 else 1
        # Rows of a wider tensor, as the last position of a window is.
        feature = torch.randn(tree.num_rows, num_above + 2, 48, generator=generator).to(DEVICE, dtype)[:, 2:]
        arguments = (head, tree, depth, feature, end, draft)
        found, expected = TritonDraftOps(overlap=overlap).open_level(*arguments), TORCH.open_level(*arguments)
        assert_same_pairs(found.pairs, expected.pairs, kind)
        assert torch.equal(found.rows, expected.rows)


@in_variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_spare", "is_narrow"), [(0, False), (5, False), (20, False), (5, True)])
@pytest.mark.parametrize("seed", range(3))
def test_children_are_chosen_as_by_torch(overlap, dtype, seed, num_spare, is_narrow):
    head, tree = make_head(dtype), padded(trees_of(seed), spare=seed % 2)
    generator = torch.Generator().manual_seed(seed)
    found, expected = (
        random_draft(tree, tree.max_rank + 1 + num_spare, torch.Generator().manual_seed(seed)) for _ in "ab"
    )
    # A draft may have fewer tokens than children are asked for.
    size = tree.max_rank + 1 if is_narrow else 500
    for depth in range(tree.depth):
        width = tree.widths[depth - 1] if depth else 1
        # A permutation has no ties, of which torch may take any.
        logits = torch.stack(
            [torch.randperm(size, generator=generator) for _ in range(tree.num_rows * width)]
        )
        logits = (logits - 250).to(DEVICE, dtype)
        TritonDraftOps(overlap=overlap).choose(head, tree, depth, logits, found)
        TORCH.choose(head, tree, depth, logits, expected)
        assert torch.equal(found.children, expected.children)
        assert torch.equal(found.token_ids, expected.token_ids)
    assert (found.token_ids.ge(0) == tree.is_node).all()
    assert (found.children[..., 0] >= 0).sum() > 0
