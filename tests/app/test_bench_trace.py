"""A trace counts the time in which nothing runs once, whatever overlaps."""

import pytest

from app.bench_trace import Kernel, Span, summarise

SPANS = [
    Span("gemm", 100.0, 200.0),
    Span("norm", 150.0, 160.0),  # inside the one before
    Span("copy", 190.0, 230.0),  # overlaps its end
    Span("gemm", 280.0, 300.0),  # after 50 us of nothing
]


def test_idle_is_what_no_kernel_covers():
    trace = summarise(SPANS, num_steps=2)
    assert trace is not None
    assert trace.idle_share == pytest.approx(50 / 200)
    assert trace.ms_per_step == pytest.approx(0.1)
    assert trace.num_launches == 2
    assert trace.kernels == (Kernel("gemm", 1.0, 60.0), Kernel("copy", 0.5, 20.0), Kernel("norm", 0.5, 5.0))


def test_order_does_not_matter():
    assert summarise(SPANS[::-1], num_steps=2) == summarise(SPANS, num_steps=2)


def test_a_trace_that_saw_nothing_is_none():
    assert summarise([], num_steps=3) is None
