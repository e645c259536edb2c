"""The dispatcher against the oracle. The quick checks take a few seeds, the slow ones all that the limits are
stated for.
"""

import pytest

from benchmarks.dispatcher_world import published_world
from benchmarks.simulate_dispatcher import TABLE_ERRORS, collapse, halved, others, ramp, stationary, summarize

LIMITED = [*stationary(), *collapse(), *halved(), ramp()]
QUICK = {
    "stationary eagle batch 16",
    "stationary eagle3 batch 1",
    "stationary eagle-low batch 64",
    "collapse published batch 1",
    "collapse h200 batch 16",
}


@pytest.mark.parametrize(
    "scenario", [scenario for scenario in LIMITED if scenario.name in QUICK], ids=lambda s: s.name
)
def test_a_few_seeds_stay_within_the_limits(scenario):
    assert summarize(scenario, range(1), 0.15).is_within


def test_requests_that_all_lean_alike_are_taken_for_a_break():
    """At one row each request might explain for itself why it accepts half of what was known."""
    (scenario,) = halved((1,))
    assert scenario.run(4, 0.0).efficiency > 0.98


def test_the_cliff_is_never_run_not_even_by_a_probe():
    scenario = next(s for s in stationary((64,)) if "eagle3" in s.name)
    assert published_world().seconds("chain-7", 64, 0) == 0.12057
    for table_error in TABLE_ERRORS:
        assert "chain-7" not in scenario.run(0, table_error).steps_by_arm


def test_a_limit_that_is_exceeded_is_told():
    scenario = next(s for s in collapse((16,)))
    strict = type(scenario.limits)(loss=-1.0)
    broken = type(scenario)(**{**vars(scenario), "limits": strict, "num_steps": 1700})
    assert not summarize(broken, range(1), 0.0).is_within


@pytest.mark.slow
@pytest.mark.parametrize("table_error", TABLE_ERRORS)
@pytest.mark.parametrize("scenario", LIMITED, ids=lambda s: s.name)
def test_twenty_seeds_stay_within_the_limits(scenario, table_error):
    summary = summarize(scenario, range(20), table_error)
    assert summary.is_within, summary


@pytest.mark.slow
@pytest.mark.parametrize("scenario", list(others()), ids=lambda s: s.name)
def test_other_traffic_beats_plain_decoding_and_comes_near_the_oracle(scenario):
    summary = summarize(scenario, range(5), 0.15)
    assert summary.worst_over_plain > 1.0
    assert summary.regret < 0.08, summary
