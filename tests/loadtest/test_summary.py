"""Figures over records: right for records whose figures are known by construction."""

import dataclasses
import itertools
import math
import random
import statistics

import pytest

from loadtest.arrivals import arrivals, constant, poisson
from loadtest.prompts import CLASSES, cycle
from loadtest.record import Record, RecordFile
from loadtest.summary import Objective, main, summarize, tokens_between


def answered(
    sent: float, first: float = 0.1, per_token: float = 0.01, num_tokens: int = 11, lag: float = 0.0
):
    """An answer that gets a token at `first` and one each `per_token` seconds."""
    chunks = tuple((sent + first + idx * per_token, idx + 1) for idx in range(num_tokens))
    end = chunks[-1][0]
    return Record("chat", 0, "auto", sent - lag, sent, end, chunks, 200, num_output_tokens=num_tokens)


def failed(sent: float, error: str = "full"):
    return Record("chat", 0, "auto", sent, sent, sent + 0.01, error=error, message="no")


def test_quantiles_are_those_of_the_answered_requests():
    rng = random.Random(3)
    firsts = [idx / 100 for idx in range(1, 101)]
    rng.shuffle(firsts)
    records = [answered(float(idx), first=first) for idx, first in enumerate(firsts)]
    records.append(failed(50.5))
    summary = summarize(records, Objective())
    assert summary.time_to_first_token == pytest.approx((0.50, 0.95, 0.99))
    assert summary.time_per_output_token == pytest.approx((0.01, 0.01, 0.01))
    assert summary.errors == {"full": 1}
    assert summary.num_requests == 101


def test_latency_counts_from_when_a_request_was_due():
    summary = summarize([answered(5.0, first=0.1, lag=2.0), answered(6.0, first=0.1, lag=2.0)], Objective())
    assert summary.time_to_first_token[0] == pytest.approx(2.1)
    assert summary.lag[0] == pytest.approx(2.0)


def test_goodput_counts_answers_that_keep_every_objective():
    records = [
        answered(0.0),
        answered(1.0, first=0.5),
        answered(2.0, per_token=0.05),
        failed(3.0),
        answered(4.0),
    ]
    objective = Objective(time_to_first_token=0.2, time_per_output_token=0.02)
    summary = summarize(records, objective)
    assert (summary.num_good, summary.good_share) == (2, 2 / 5)
    # The window is the four seconds between the first and the last one sent; one good answer ended in it.
    assert summary.window == pytest.approx(4.0)
    assert summary.good_per_second == pytest.approx(1 / 4)
    assert summarize(records, Objective(end_to_end=0.1)).num_good == 0


def test_rate_of_tokens_is_that_of_the_window_whoever_sent_the_request():
    """Streams of one token per 10 ms each, for ever: B of them give 100 B tokens a second."""
    num_streams = 4
    records = [
        answered(begin * 1.0, first=0.01, num_tokens=100) for begin in range(10) for _ in range(num_streams)
    ]
    summary = summarize(records, Objective(), warm_up=2.0)
    assert summary.window == pytest.approx(7.0)
    assert summary.tokens_per_second == pytest.approx(100 * num_streams, rel=0.01)
    assert summary.num_requests == 8 * num_streams


def test_tokens_that_a_server_counts_at_the_end_are_not_lost():
    """Three events of what were nine tokens, told by the last usage: all of them came."""
    told = [answered(float(idx)) for idx in range(3)]
    untold = [
        dataclasses.replace(one, chunks=tuple((when, 1) for when, _ in one.chunks[::4])) for one in told
    ]
    assert untold[0].chunks[-1][0] < told[0].chunks[-1][0]
    assert sum(tokens_between(one, 0.0, 9.0) for one in untold) == 3 * 11
    assert tokens_between(untold[0], 0.0, untold[0].chunks[0][0]) == 1


def test_nothing_at_all_is_a_summary_too():
    summary = summarize([], Objective())
    assert (summary.num_requests, summary.tokens_per_second) == (0, 0.0)
    assert math.isnan(summary.time_to_first_token[0])
    assert summary.lines()


def test_command_prints_and_judges(tmp_path, capsys):
    path = tmp_path / "records.jsonl"
    file = RecordFile(path)
    for record in (answered(0.0), answered(1.0, first=0.5)):
        file.append(record)
    file.close()
    assert main([str(path), "--ttft", "0.2", "--good-share", "0.5"]) == 0
    assert "good 1 (50.0%)" in capsys.readouterr().out
    assert main([str(path), "--ttft", "0.2", "--good-share", "0.6"]) == 1


def test_constant_arrivals_do_not_drift():
    times = [time for time, _ in zip(constant(3.0), range(3001), strict=False)]
    assert times[0] == 0.0
    assert times[3000] == pytest.approx(1000.0, abs=1e-9)


def test_poisson_arrivals_have_exponential_gaps_and_a_seed():
    times = [time for time, _ in zip(poisson(5.0, seed=1), range(4000), strict=False)]
    gaps = [right - left for left, right in itertools.pairwise(times)]
    # Mean and deviation of an exponential are both 1 / rate; a constant source fails the second.
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.08)
    assert times[:5] == [time for time, _ in zip(arrivals("poisson", 5.0, 1), range(5), strict=False)]
    assert times[0] != next(poisson(5.0, seed=2))


def test_prompts_take_the_classes_in_turn_and_reach_every_text():
    prompts = [prompt for prompt, _ in zip(cycle(list(CLASSES)), range(28), strict=False)]
    assert [prompt.prompt_class for prompt in prompts[:5]] == list(CLASSES)
    assert {prompt.text for prompt in prompts} == {text for texts in CLASSES.values() for text in texts}
    assert next(cycle(["code"], start=2)).text == CLASSES["code"][2]
    with pytest.raises(KeyError):
        next(cycle(["poetry"]))
