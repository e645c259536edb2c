"""The verdict on two drafts: intervals that hold the truth, arms compared at equal batch, no pass without
data.

Windows are drawn from known drafts; a control that ignores buckets must be wrong.
"""

import dataclasses
import math
import random

import numpy as np
import pytest
from scipy import stats

from ops.rollout.analysis import BUCKETS, Limits, Verdict, Window, bucket_of, judge, student_quantile

LIMITS = Limits(margin=0.03, error_rate=0.05, max_looks=4, min_windows=5)


def draw(
    count: int, length: float, step_s: float, batch: int, seed: int, noise: float = 0.05
) -> list[Window]:
    """Windows of a draft with `length` tokens per call and steps of `step_s`, each off by about `noise`."""
    source = random.Random(seed)
    windows = []
    for _ in range(count):
        steps = source.randint(800, 1200)
        tokens = round(steps * batch * length * math.exp(source.gauss(0, noise)))
        seconds = steps * step_s * math.exp(source.gauss(0, noise))
        windows.append(Window(seconds, steps, steps * batch, tokens))
    return windows


@pytest.mark.parametrize(
    ("length", "step_s", "verdict"),
    [
        (2.4, 0.010, Verdict.PASS),  # more is accepted at equal cost
        (2.0, 0.010, Verdict.PASS),  # as good as stable
        (1.6, 0.010, Verdict.FAIL),
        (2.0, 0.012, Verdict.FAIL),  # as much is accepted, but a step costs 20% more
    ],
)
def test_many_windows_tell_drafts_apart(length, step_s, verdict):
    analysis = judge(draw(800, length, step_s, 4, 1), draw(800, 2.0, 0.010, 4, 2), (), LIMITS)
    assert analysis.verdict is verdict, analysis.reason
    assert analysis.acceptance.estimate == pytest.approx(length / 2.0, rel=0.01)
    assert analysis.time_per_token.estimate == pytest.approx(step_s / 0.010 * 2.0 / length, rel=0.02)
    assert analysis.buckets == (4,)


def test_a_wider_margin_of_time_puts_up_with_slower_steps():
    arms = draw(800, 2.0, 0.012, 4, 1), draw(800, 2.0, 0.010, 4, 2)
    limits = dataclasses.replace(LIMITS, time_margin=0.3)
    assert judge(*arms, (), limits).verdict is Verdict.PASS


def test_few_windows_of_equal_drafts_are_inconclusive():
    assert judge(draw(5, 2, 0.01, 4, 1), draw(5, 2, 0.01, 4, 2), (), LIMITS).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(("num_candidate", "num_stable"), [(0, 0), (0, 100), (100, 0), (4, 100), (100, 4)])
def test_missing_windows_are_never_a_pass(num_candidate, num_stable):
    analysis = judge(draw(num_candidate, 9, 0.001, 4, 1), draw(num_stable, 2, 0.01, 4, 2), (), LIMITS)
    assert analysis.verdict is Verdict.INCONCLUSIVE
    assert "no batch bucket has 5 windows of both drafts" in analysis.reason
    assert analysis.acceptance is None


def test_a_problem_of_a_canary_replica_is_an_error_whatever_was_measured():
    analysis = judge(draw(200, 9, 0.001, 4, 1), draw(200, 2, 0.01, 4, 2), ("r0 is gone",), LIMITS)
    assert (analysis.verdict, analysis.reason) == (Verdict.ERROR, "r0 is gone")


def mixed(small: int, large: int, length: float, seed: int) -> list[Window]:
    """Windows at batch 1 and at batch 32, where acceptance is the same and a step costs four times as
    much.
    """
    return [*draw(small, length, 0.01, 1, seed), *draw(large, length, 0.04, 32, seed + 1)]


def test_arms_under_different_load_are_compared_within_buckets():
    """The canary got the large batches: pooled, its time per token is twice that of the equal stable
    draft.
    """
    candidate, stable = mixed(60, 240, 2.0, 1), mixed(240, 60, 2.0, 3)
    analysis = judge(candidate, stable, (), LIMITS)
    assert analysis.verdict is Verdict.PASS, analysis.reason
    assert analysis.buckets == (1, 32)
    pooled = [
        sum(w.seconds for w in arm) / sum(w.tokens_per_sequence for w in arm) for arm in (candidate, stable)
    ]
    assert pooled[0] / pooled[1] > 1.5, "the control must be fooled, else this test shows nothing"


def test_a_bucket_that_one_arm_lacks_does_not_count():
    candidate = [*draw(100, 2.0, 0.01, 4, 1), *draw(100, 9.0, 0.01, 32, 2)]
    analysis = judge(candidate, draw(100, 2.0, 0.01, 4, 3), (), LIMITS)
    assert analysis.buckets == (4,)
    assert analysis.acceptance.estimate == pytest.approx(1.0, rel=0.03)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """At an error rate of 0.4 over two metrics and one look, each bound of an interval may miss by 0.1."""
    limits = dataclasses.replace(LIMITS, error_rate=0.4, max_looks=1)
    num_misses = [0, 0]
    for seed in range(1000):
        analysis = judge(draw(8, 2.2, 0.01, 4, seed), draw(8, 2.0, 0.01, 4, seed + 5000), (), limits)
        num_misses[0] += analysis.acceptance.low > 1.1
        num_misses[1] += analysis.acceptance.high < 1.1
    for misses in num_misses:
        assert stats.binomtest(misses, 1000, 0.1).pvalue > 0.001, num_misses


def test_a_worse_draft_passes_at_most_as_often_as_the_error_rate():
    """At the margin itself a pass is wrong in at most 0.05 of rollouts, four looks together."""
    num_wrong = 0
    for seed in range(300):
        source = draw(40, 2.0 * 0.97, 0.01, 4, seed, 0.02), draw(40, 2.0, 0.01, 4, seed + 5000, 0.02)
        verdicts = [judge(source[0][:n], source[1][:n], (), LIMITS).verdict for n in (10, 20, 30, 40)]
        num_wrong += Verdict.PASS in verdicts
    assert stats.binomtest(num_wrong, 300, 0.05, "greater").pvalue > 0.001, num_wrong


def test_looking_more_often_widens_the_intervals():
    arms = draw(20, 2.2, 0.01, 4, 1), draw(20, 2.0, 0.01, 4, 2)
    once, often = (judge(*arms, (), dataclasses.replace(LIMITS, max_looks=n)) for n in (1, 20))
    assert often.acceptance.low < once.acceptance.low < once.acceptance.high < often.acceptance.high


def test_the_verdict_does_not_depend_on_the_order_of_windows():
    candidate, stable = draw(30, 2.1, 0.01, 4, 1), draw(30, 2.0, 0.01, 4, 2)
    expected = judge(candidate, stable, (), LIMITS)
    shuffled = judge(candidate[::-1], stable[::-1], (), LIMITS)
    assert shuffled.acceptance.low == pytest.approx(expected.acceptance.low)
    assert shuffled.verdict is expected.verdict


@pytest.mark.parametrize("freedom", [3, 8, 20, 200])
@pytest.mark.parametrize("tail", [0.05, 0.0125, 0.00125])
def test_student_quantile_is_that_of_scipy(freedom, tail):
    assert student_quantile(1 - tail, freedom) == pytest.approx(stats.t.ppf(1 - tail, freedom), rel=0.04)


def test_every_batch_has_one_bucket():
    found = [bucket_of(batch) for batch in np.arange(1, 200)]
    assert found[0] == 1
    assert [b for i, b in enumerate(found) if i == 0 or found[i - 1] != b] == [*BUCKETS, 0]
    assert bucket_of(4.4) == 4
    assert bucket_of(64.6) == 0
