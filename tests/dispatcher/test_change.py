import random

import pytest

from engine.dispatcher.change import ChangeDetector
from engine.dispatcher.evidence import Outcome, Seen

HIT, MISS = Outcome(0, 0, 1), Outcome(0, 1, 1)


def feed(detector, source, truth, predicted, batch):
    """Observe one step of `batch` rows; return its alarm at a threshold of 10 nats."""
    step = [Seen(HIT if source.random() < truth else MISS, 1, predicted) for _ in range(batch)]
    return detector.observe(step, 10.0)


@pytest.mark.parametrize("batch", [1, 16, 64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_what_is_as_predicted_hardly_ever_alarms(p, batch):
    detector, source = ChangeDetector(), random.Random(0)
    alarms = [feed(detector, source, p, p, batch) for _ in range(20_000 // batch)]
    assert sum(alarm is not None for alarm in alarms) <= 1


@pytest.mark.parametrize(("before", "after"), [(0.76, 0.0), (0.5, 0.05), (0.1, 0.7)])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_break_is_noticed_within_a_few_dozen_rows(before, after, batch):
    detector, source = ChangeDetector(), random.Random(2)
    for _ in range(2000):
        feed(detector, source, before, before, batch)
    alarms = [feed(detector, source, after, before, batch) for _ in range(48 // batch)]
    since = next(alarm for alarm in alarms if alarm is not None)
    assert since.tries(0)[0] <= 48 + 4 * batch, "it begins about where acceptance broke"
    found = since.hits(0)[0] / since.tries(0)[0]
    assert abs(found - after) < abs(found - before)


def test_the_order_of_rows_in_a_step_does_not_matter():
    orders = ([HIT] * 30 + [MISS] * 30, [MISS] * 30 + [HIT] * 30)
    steps = [[Seen(outcome, 1, 0.5) for outcome in order] for order in orders]
    assert [ChangeDetector().observe(step, 10.0) for step in steps] == [None, None]


def test_after_an_alarm_it_begins_anew():
    detector = ChangeDetector()
    assert detector.observe([Seen(MISS, 50, 0.9)], 10.0) is not None
    assert detector.observe([], 10.0) is None
