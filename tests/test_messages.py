"""Messages between the core and its client arrive as they were sent."""

import pickle

import pytest

from engine.batch import SequenceDelta
from engine.logprobs import TokenLogprob
from engine.messages import Deltas
from engine.request import FinishReason

SCORED = (TokenLogprob(-0.5, ((7, -0.5), (8, -1.5))),)
FIRST = SequenceDelta("a", (7,), 0, None, 1, 3, 0, 16, started=2.5, logprobs=SCORED)
LAST = SequenceDelta("b", (5, 6, 9), 2, FinishReason.STOP, 4, 12, 7, 0, "why", 3.5)


@pytest.mark.parametrize("deltas", [(), (FIRST,), (FIRST, LAST)])
def test_deltas_arrive_as_they_were_sent(deltas):
    message = Deltas(deltas, num_added=3)
    received = pickle.loads(pickle.dumps(message))
    assert received == message
    assert all(type(delta) is SequenceDelta for delta in received.deltas)
    assert [delta.finish_reason for delta in received.deltas] == [delta.finish_reason for delta in deltas]
