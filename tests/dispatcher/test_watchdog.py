import itertools
import random

import pytest

from engine.dispatcher.watchdog import Watchdog


def run(watchdog, num_steps, tokens_of, plain_tokens, batch=8):
    """Return the steps at which it tripped; blocked steps pass without speculation."""
    trips = []
    for step in range(num_steps):
        watchdog.pass_step()
        if not watchdog.num_blocked:
            watchdog.observe([tokens_of() for _ in range(batch)], plain_tokens)
            if watchdog.num_blocked:
                trips.append(step)
    return trips


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_what_brings_as_much_as_plain_decoding_is_left_alone(batch):
    source = random.Random(0)
    trips = run(Watchdog(), 5000, lambda: source.choice((1, 1, 2, 4)), 2.0 * batch, batch)
    assert trips == []


@pytest.mark.parametrize("batch", [8, 64])
def test_what_brings_less_is_blocked_for_ever_longer(batch):
    source = random.Random(0)
    watchdog = Watchdog()
    trips = run(watchdog, 6000, lambda: source.choice((1, 1, 2)), 1.6 * batch, batch)
    gaps = [right - left for left, right in itertools.pairwise(trips)]
    assert trips[0] < 200
    assert len(trips) >= 4
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 2 * gaps[0]
    assert watchdog.num_trips == len(trips)


def test_a_loss_within_the_noise_of_few_rows_does_not_trip():
    source = random.Random(0)
    assert run(Watchdog(), 200, lambda: source.choice((1, 1, 1, 5)), 2.05, batch=1) == []
