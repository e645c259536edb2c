import itertools

import pytest

from engine.request import Request, SamplingParams, Sequence
from engine.scheduler.queue import WaitingQueue


def make_sequence(priority: int, arrival_idx: int) -> Sequence:
    request = Request(f"{priority}-{arrival_idx}", (1,), SamplingParams(), priority)
    return Sequence(request, seed=0, arrival_idx=arrival_idx)


def drain(queue: WaitingQueue) -> list[Sequence]:
    order = []
    while len(queue):
        order.append(queue.peek())
        queue.remove(order[-1])
    return order


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_sequences_leave_by_priority_then_arrival(order):
    sequences = [make_sequence(-1, 3), make_sequence(0, 0), make_sequence(0, 2), make_sequence(5, 1)]
    queue = WaitingQueue()
    for idx in order:
        queue.push(sequences[idx])
    assert drain(queue) == sequences


def test_a_sequence_is_removed_from_the_middle():
    sequences = [make_sequence(0, idx) for idx in range(5)]
    queue = WaitingQueue()
    for sequence in sequences:
        queue.push(sequence)
    queue.remove(sequences[2])
    assert drain(queue) == [*sequences[:2], *sequences[3:]]
