"""`eyas validate speedup`: the measuring, the verdict and the report, against servers of known speed."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from app import cli_validate
from app.cli import main
from app.speedup import ORDERS, SpeedupPlan, measure, prompts_digest
from app.speedup_verdict import Estimate, Floor, declared, judge, overall, quotient, relative_to
from engine import StepError
from loadtest.record import Record
from loadtest.sse_client import SSEClient
from tests.app.arm_server import ArmServer, SlowProxy, running

AT_ONCE = {"off": 0.0, "auto": 0.0}
FLAGS = ["--batch", "1,2", "--blocks", "3", "--max-tokens", "16"]
NOISE = 0.02


def validate(url: str, out: Path, *flags: str) -> int:
    return main(["validate", "speedup", "--url", url, "--out", str(out), *FLAGS, *flags])


@pytest.fixture
def timed(monkeypatch) -> Callable[..., None]:
    """Let the client ask over HTTP, but read times of `gaps` seconds per token: those of no busy machine."""
    source = random.Random(2)

    def install(**gaps: float) -> None:
        class Timed(SSEClient):
            def ask(self, question, intended=None):
                record = super().ask(question, intended)
                gap = gaps[record.speculation] * source.uniform(1 - NOISE, 1 + NOISE)
                chunks = tuple((5 + count * gap, count) for _, count in record.chunks)
                return dataclasses.replace(record, sent=5.0, chunks=chunks)

        monkeypatch.setattr(cli_validate, "SSEClient", Timed)

    return install


def test_a_true_speed_up_passes_and_is_told_in_two_files(timed, tmp_path, capsys):
    timed(off=0.02, auto=0.01)
    with running(ArmServer(AT_ONCE)) as url:
        assert validate(url, tmp_path, "--floor", "1:1.9,2:1.8") == 0
    report = json.loads((tmp_path / "speedup.json").read_text())
    assert report["verdict"] == "pass"
    assert [cell["batch"] for cell in report["cells"]] == [1, 2]
    for cell in report["cells"]:
        assert cell["speedup"] == pytest.approx(2.0, rel=0.03)
        assert cell["low"] <= cell["speedup"] <= cell["high"]
        assert cell["tokens_per_call"] == 2.5
        assert cell["num_equal"] == cell["num_pairs"] == 3 * 2 * cell["batch"]
    page = (tmp_path / "speedup.html").read_text()
    plot = ET.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])
    assert len(plot.findall(".//{http://www.w3.org/2000/svg}polyline")) == 2, "measured, and the floor"
    assert 'class="pass"' in page
    assert page.count("src=") == page.count("href=") == 0, "the page needs no other file"
    assert "verdict: pass" in capsys.readouterr().out


def test_an_arm_that_became_a_fifth_slower_is_a_regression_against_the_stored_run(timed, tmp_path):
    with running(ArmServer(AT_ONCE)) as url:
        timed(off=0.02, auto=0.01)
        assert validate(url, tmp_path / "then") == 0
        stored = ["--baseline", str(tmp_path / "then" / "speedup.json")]
        assert validate(url, tmp_path / "same", *stored) == 0
        timed(off=0.02, auto=0.01 * 1.25)
        assert validate(url, tmp_path / "now", *stored) == 3
        # In between, the edge of what is allowed lies inside the interval.
        timed(off=0.02, auto=0.01 / 0.95)
        assert validate(url, tmp_path / "doubt", *stored) == 4
    report = json.loads((tmp_path / "now" / "speedup.json").read_text())
    assert report["verdict"] == "regression"
    for cell in report["cells"]:
        assert cell["judgement"]["relative"]["value"] == pytest.approx(0.8, rel=0.04)


def test_the_clock_of_the_client_sees_the_faster_arm_and_the_injected_delay(tmp_path):
    """In real time, with room for a busy machine: the strict test is the one below."""
    with running(ArmServer({"off": 0.02, "auto": 0.004})) as url:
        assert validate(url, tmp_path, "--batch", "2", "--floor", "1.5") == 0
        with running(SlowProxy(url, factor=5 * 5)) as slow:
            assert validate(slow, tmp_path, "--batch", "2", "--max-tokens", "8", "--floor", "1.0") == 3


@pytest.mark.slow
def test_a_fifth_slower_is_seen_in_real_time(tmp_path):
    """For a quiet machine."""
    with running(ArmServer({"off": 0.012, "auto": 0.006})) as url:
        assert validate(url, tmp_path / "then", "--floor", "1.9") == 0
        stored = ["--baseline", str(tmp_path / "then" / "speedup.json")]
        assert validate(url, tmp_path / "same", *stored) == 0
        with running(SlowProxy(url, factor=1.25)) as slow:
            assert validate(slow, tmp_path / "now", *stored) == 3


@pytest.mark.parametrize(("dtype", "status"), [("float32", 1), ("bfloat16", 0)])
def test_answers_that_differ_are_an_error_in_float32_and_counted_elsewhere(
    dtype, status, timed, tmp_path, capsys
):
    timed(off=0.02, auto=0.01)
    with running(ArmServer(AT_ONCE, dtype=dtype, differs=True)) as url:
        assert validate(url, tmp_path, "--batch", "2", "--floor", "1.2") == status
    cells = json.loads((tmp_path / "speedup.json").read_text())["cells"]
    assert [cell["num_equal"] for cell in cells] == [0]
    assert ("differ between the arms" in capsys.readouterr().err) == (status == 1)


def test_what_does_not_compare_is_refused_before_anything_is_measured(tmp_path, capsys):
    server = ArmServer(AT_ONCE, digest="another")
    stored = {
        "cells": [{"batch": 1, "speedup": 2.0, "low": 1.9, "high": 2.1}],
        "environment": {"model_digest": "m"},
        "plan": {"arm": "auto", "max_tokens": 16},
    }
    path = tmp_path / "stored.json"
    path.write_text(json.dumps(stored))
    with running(server) as url:
        assert validate(url, tmp_path, "--baseline", str(path)) == 1
        assert "model digest m, this run has another" in capsys.readouterr().err
        path.write_text(json.dumps(stored | {"environment": {"model_digest": "another"}}))
        assert validate(url, tmp_path, "--baseline", str(path)) == 1
        assert "has no batch size 2" in capsys.readouterr().err
        path.write_text("{}")
        assert validate(url, tmp_path, "--baseline", str(path)) == 1
        assert "is no stored run" in capsys.readouterr().err
        assert validate(url, tmp_path, "--floor", "1:1.0") == 1
        assert "no value for the batch size 2" in capsys.readouterr().err
    assert server.bodies == []


def test_no_server_is_one_clear_error(tmp_path, capsys):
    assert validate("http://127.0.0.1:9", tmp_path) == 1
    assert "no Eyas server answers at http://127.0.0.1:9" in capsys.readouterr().err
    for url in ("file:///etc/hosts", "http://a b"):
        assert validate(url, tmp_path) == 1
        assert "http://HOST:PORT" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with running(ArmServer(AT_ONCE)) as url:
        assert validate(url, tmp_path / "file") == 1
    assert "cannot make the folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"speedup": "2.0x"},
        {"low": 0},
        {"high": 1.0},
        {"speedup": float("nan")},
        {"blocks": []},
        {"blocks": [{"plain": 1.0, "speculative": 0.0}] * 3},
        {"blocks": [{"plain": 1.0}] * 3},
    ],
)
def test_a_stored_run_with_impossible_figures_is_refused_before_anything_is_measured(
    change, tmp_path, capsys
):
    cell = {"speedup": 2.0, "low": 1.9, "high": 2.1, "blocks": [{"plain": 2.0, "speculative": 1.0}] * 3}
    stored = {
        "cells": [{"batch": batch, **cell, **change} for batch in (1, 2)],
        "environment": {"model_digest": "m"},
        "plan": {"arm": "auto", "max_tokens": 16},
        "prompts": prompts_digest(),
    }
    (tmp_path / "stored.json").write_text(json.dumps(stored))
    server = ArmServer(AT_ONCE)
    with running(server) as url:
        assert validate(url, tmp_path, "--baseline", str(tmp_path / "stored.json")) == 1
    assert "is no stored run" in capsys.readouterr().err
    assert server.bodies == []


def test_a_kill_takes_the_server_that_was_started_along(tmp_path, monkeypatch):
    """A command in the place of `eyas serve`, which never becomes ready; SIGTERM as from a `timeout`."""
    started: list[subprocess.Popen] = []

    def start(command, **arguments):
        assert command[3] == "serve"
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"], **arguments))
        return started[0]

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    real = subprocess.Popen
    monkeypatch.setattr(cli_validate.subprocess, "Popen", start)
    monkeypatch.setattr(cli_validate, "_wait", kill)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        main(["validate", "speedup", "--out", str(tmp_path)])
    assert left.value.code == 128 + signal.SIGTERM
    assert started[0].poll() is not None
    assert signal.getsignal(signal.SIGTERM) == before


PLAN = SpeedupPlan("tiny", "tree-8", (2,), 4, 10)


def spoken(seconds: Callable[[str], float], error: str | None = None):
    """Return what asks a server that needs `seconds(arm)` for each run, and the list of what it was asked."""
    asked = []

    def ask(questions):
        asked.append(questions)
        duration = seconds(questions[0].body["speculation"])
        return [
            Record(
                "chat",
                0,
                "",
                5.0,
                5.0,
                5 + duration,
                ((5 + duration, 10),),
                error=error,
                num_output_tokens=10,
            )
            for _ in questions
        ]

    return ask, asked


def test_blocks_pair_the_same_prompts_and_mirror_their_order():
    ask, asked = spoken(lambda arm: 1.0)
    measure(ask, PLAN, lambda cell: None)
    runs = asked[2:]  # behind the warm-up of both arms
    assert len(runs) == PLAN.num_blocks * 5
    seen = []
    for block_idx in range(PLAN.num_blocks):
        warm, *block = runs[block_idx * 5 : block_idx * 5 + 5]
        letters = "".join("A" if run[0].body["speculation"] == "off" else "B" for run in block)
        assert letters == ORDERS[block_idx % 2]
        texts = {tuple(question.body["messages"][0]["content"] for question in run) for run in (warm, *block)}
        assert len(texts) == 1
        seen += texts
        assert [question.body["max_tokens"] for question in warm] == [1, 1]
    assert len(set(seen)) == PLAN.num_blocks, "each block has its own prompts"


def test_drift_cancels_in_a_block():
    """A machine that slows down steadily: both arms are equal, whichever goes first."""
    clock = iter(range(1, 1000))
    ask, _ = spoken(lambda arm: 1.0 + 0.01 * next(clock))
    (cell,) = measure(ask, PLAN, lambda cell: None)
    assert cell.speedup == pytest.approx(1.0, abs=1e-9)
    assert cell.high - cell.low < 1e-9


def test_interval_holds_the_truth_under_noise():
    source = random.Random(1)
    ask, _ = spoken(lambda arm: (2.0 if arm == "off" else 1.0) * source.uniform(0.9, 1.1))
    (cell,) = measure(ask, PLAN, lambda cell: None)
    assert cell.low < 2.0 < cell.high
    assert cell.low > 1.5


def test_a_request_that_fails_ends_the_measuring():
    ask, _ = spoken(lambda arm: 1.0, error="full")
    with pytest.raises(StepError, match="full"):
        measure(ask, PLAN, lambda cell: None)


@pytest.mark.parametrize(
    ("measured", "floor", "margin", "verdict"),
    [
        (Estimate(1.5, 1.4, 1.6), declared(1.3), 0.0, "pass"),
        (Estimate(1.5, 1.3, 1.7), declared(1.3), 0.0, "pass"),  # the edge belongs to pass
        (Estimate(1.5, 1.2, 1.8), declared(1.3), 0.0, "inconclusive"),
        (Estimate(1.2, 1.1, 1.29), declared(1.3), 0.0, "regression"),
        (Estimate(1.2, 1.1, 1.29), declared(1.3), 0.2, "pass"),
        (Estimate(1.0, 0.98, 1.02), declared(1.0), 0.05, "pass"),
        # The stored run is uncertain too: what a declared 1.5 would call a regression is not sure.
        (Estimate(1.35, 1.3, 1.4), declared(1.5), 0.0, "regression"),
        (Estimate(1.35, 1.3, 1.4), Floor(Estimate(1.5, 1.3, 1.7)), 0.0, "inconclusive"),
    ],
)
def test_verdict_follows_the_whole_interval(measured, floor, margin, verdict):
    assert judge(quotient(measured, floor.estimate), margin).verdict == verdict


def test_verdict_of_a_quotient_is_that_of_its_inverse_mirrored():
    left, right = Estimate(1.5, 1.4, 1.7), Estimate(1.2, 1.0, 1.3)
    relative, inverse = quotient(left, right), quotient(right, left)
    assert relative.value == pytest.approx(1 / inverse.value)
    assert relative.low == pytest.approx(1 / inverse.high)
    assert relative.high == pytest.approx(1 / inverse.low)


def test_blocks_that_both_runs_asked_are_compared_one_by_one():
    """Prompts that speculation helps by 1.1 to 2.5 times: a tenth less of each is seen all the same."""
    gains = [1.1, 2.5, 1.3, 1.9, 1.2, 2.2]
    then = Floor(Estimate(1.56, 1.25, 2.0), tuple((1.0, 1 / gain) for gain in gains))
    now = [(1.0, 1 / (0.9 * gain)) for gain in gains]
    relative = relative_to(then, Estimate(1.4, 1.12, 1.8), now)
    assert (relative.low, relative.value, relative.high) == pytest.approx((0.9, 0.9, 0.9))
    apart = relative_to(Floor(then.estimate), Estimate(1.4, 1.12, 1.8), now)
    assert apart.low < 0.7
    assert apart.high > 1.1
    more = Floor(then.estimate, (*then.blocks, (1.0, 100.0)))
    assert relative_to(more, Estimate(1.4, 1.12, 1.8), now) == relative, "only what both have"


def test_one_regression_outweighs_doubt_and_doubt_outweighs_passes():
    assert overall(["pass", "inconclusive", "regression"]) == "regression"
    assert overall(["pass", "inconclusive"]) == "inconclusive"
    assert overall(["pass", "pass"]) == "pass"
