"""The seconds of steps in a row add up to the time that passes; those of a lone step are its own."""

import pytest
import torch

from engine.runner import step_handle
from engine.runner.step_handle import StepTimer

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(step_handle.time, "perf_counter", lambda: now[0])
    return now


def launch(clock, seconds, before=None):
    timer = StepTimer(CPU, before)
    clock[0] += seconds
    timer.stop()
    return timer


def test_a_step_that_nothing_follows_lasts_as_long_as_it_runs(clock):
    timer = launch(clock, 2.0)
    clock[0] += 30.0
    assert timer.wait() == 2.0


def test_a_step_lasts_until_the_next_is_launched(clock):
    first = launch(clock, 2.0)
    clock[0] += 0.5  # what the host does between launches
    second = launch(clock, 3.0, first)
    assert first.wait() == 2.5
    clock[0] += 0.25
    third = launch(clock, 1.0, second)
    assert (second.wait(), third.wait()) == (3.25, 1.0)


def test_idle_time_belongs_to_no_step(clock):
    first = launch(clock, 2.0)
    assert first.wait() == 2.0
    clock[0] += 60.0
    second = launch(clock, 1.0, first)
    assert second.wait() == 1.0
    assert first.wait() == 2.0
