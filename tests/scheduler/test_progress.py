import pytest

from engine.batch import DecodeRow
from engine.draft_restart import DraftRestart
from engine.request import Request, SamplingParams, Sequence
from engine.row_kind import RowKind
from engine.scheduler.progress import Progress
from engine.scheduler.stopping import StopRule
from engine.tree.topology import chain, root_only

WINDOW = 4


def make_progress(num_tokens: int = 21, num_prompt: int = 20, max_tokens: int = 10) -> Progress:
    request = Request("r", tuple(range(num_prompt)), SamplingParams(max_tokens=max_tokens))
    sequence = Sequence(request, seed=0, arrival_idx=0, tokens=list(range(num_tokens)))
    return Progress(sequence, StopRule.build(request.sampling, num_prompt, frozenset(), 100), None)


def test_bounds_add_what_every_step_in_flight_may_emit():
    progress = make_progress()
    assert progress.max_prefix_len == 20
    for topology in (chain(3), root_only()):
        progress.plan_decode(topology)
    assert progress.max_prefix_len == 20 + 4 + 1
    assert progress.collect_decode() == chain(3)
    assert progress.max_prefix_len == 20 + 1


@pytest.mark.parametrize(("max_tokens", "is_ending"), [(2, True), (3, True), (4, False)])
def test_a_sequence_is_ending_once_the_least_in_flight_reaches_the_cap(max_tokens, is_ending):
    progress = make_progress(max_tokens=max_tokens)
    progress.plan_decode(chain(3))
    progress.plan_decode(chain(3))
    assert progress.is_ending is is_ending


@pytest.mark.parametrize("num_hit", [0, 1, 8])
def test_a_prefill_runs_the_last_hit_token_again(num_hit):
    progress = make_progress()
    progress.start(num_hit, draft_start=num_hit // 2)
    assert progress.num_prefilled == max(0, num_hit - 1)
    assert progress.store_from == num_hit
    assert progress.prefill_end == 20
    assert progress.draft_valid == range(num_hit // 2, num_hit)


@pytest.mark.parametrize(
    ("root", "valid"),
    [(12, range(13)), (15, range(16)), (16, range(13, 17)), (30, range(27, 31)), (5, range(12))],
)
def test_a_tree_step_closes_gaps_within_its_window_only(root, valid):
    progress = make_progress()
    progress.draft_valid = range(12)
    progress.observe_tree(root, WINDOW)
    assert progress.draft_valid == valid


@pytest.mark.parametrize(
    ("draft_stop", "num_cached", "expected"),
    [(20, 20, 20), (21, 20, 20), (18, 20, 18), (16, 20, 16), (3, 20, 16)],
)
def test_blocks_wait_while_their_draft_kv_may_still_come(draft_stop, num_cached, expected):
    progress = make_progress()
    progress.sequence.num_cached = num_cached
    progress.draft_valid = range(draft_stop)
    assert progress.num_publishable(WINDOW) == expected


def test_another_draft_invalidates_what_steps_in_flight_will_write():
    progress = make_progress()
    progress.draft_valid = range(21)
    progress.plan_decode(chain(3))
    assert not progress.restart_draft().is_prefilling
    progress.observe_tree(20, WINDOW)
    assert len(progress.draft_valid) == 0
    progress.observe_tree(30, 10)
    assert progress.draft_valid == range(25, 31)


@pytest.mark.parametrize(
    ("num_hit", "num_prefilled", "start", "is_prefilling"),
    [
        (0, 0, 0, True),
        (0, 12, 12, True),
        (8, 7, 8, True),
        (8, 12, 12, True),
        (0, 19, 0, False),
        (8, 19, 8, False),
    ],
)
def test_a_new_draft_begins_behind_what_is_shared_and_what_chunks_have_passed(
    num_hit, num_prefilled, start, is_prefilling
):
    progress = make_progress()
    progress.sequence.slot = 3
    progress.prefill_end, progress.store_from, progress.num_prefilled = 19, num_hit, num_prefilled
    assert progress.restart_draft() == DraftRestart(3, start, is_prefilling)


def test_the_row_stays_the_same_until_its_tree_its_kind_or_its_slot_may_change():
    progress = make_progress()
    progress.sequence.slot = 3
    tree = chain(3)
    row = progress.plan_decode(tree)
    assert row == DecodeRow(3, tree, RowKind(2, context_bucket=0), 0)
    progress.sequence.num_cached = 2048
    assert progress.plan_decode(tree) is row
    progress.sequence.num_cached = 2049
    longer = progress.plan_decode(tree)
    assert longer == row._replace(kind=RowKind(2, context_bucket=1))
    assert progress.plan_decode(root_only()).topology == root_only()
    progress.sequence.num_cached, progress.sequence.slot = 0, 5
    progress.start(0, 0)
    assert progress.plan_decode(tree) == row._replace(slot=5)


def test_a_new_start_counts_on_no_block_of_the_last_one():
    progress = make_progress()
    progress.num_places = progress.publish_from = 64
    progress.start(16, 0)
    assert (progress.num_places, progress.publish_from) == (0, 0)
