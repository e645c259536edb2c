"""Prefills that can be captured, on any device: attention by device data alone, and graphs that run again.

What must come out is left to the tests of this folder and of `tests/gpu`.
"""

import dataclasses
from types import SimpleNamespace

import torch

from engine.attention.backend import AttentionLayout, PrefillLayout
from engine.attention.reference import ReferenceAttention
from engine.runner.graph_recorder import Recorded
from tests.exactness.head import build_drafter
from tests.exactness.tiny import EngineShape, build_engine, prompts, request_of, run


class DeviceReference(ReferenceAttention):
    """The reference without lengths on the host: full tables make it slow, not wrong.

    A token of a prefill is a row of its own, which reads the pages before it and itself.
    """

    is_capturable = True
    is_prefill_capturable = True

    def bind_prefill(self, layout: PrefillLayout, block_size: int):
        def attend(q, k_pages, v_pages):
            owners = torch.repeat_interleave(layout.cu_seqlens.diff(), output_size=len(q))
            offsets = torch.arange(len(q), device=q.device) - layout.cu_seqlens[owners]
            ends = (layout.starts[owners] + offsets)[:, None]
            tables, own = layout.block_tables[owners], ends.clamp(min=0)
            places = (tables.gather(1, own // block_size), own % block_size)
            rows = AttentionLayout(
                tables, layout.window_starts[owners][:, None], ends, torch.ones_like(ends[..., None]).bool()
            )
            attend_pages = self.bind(rows, block_size)
            return attend_pages(q[:, None], k_pages[places], v_pages[places], k_pages, v_pages)[:, 0]

        return attend


class RerunRecorder:
    """Stands for a `GraphRecorder` where there are no graphs: a replay runs again."""

    def __init__(self):
        self.num_graphs = 0

    def record(self, do):
        do()
        self.num_graphs += 1
        return Recorded(SimpleNamespace(replay=do), do())


# Prompts, and engines of `block_size` 4 that take them in small pieces, share their beginnings, or are too
# small.
SCENARIOS = {
    "one token and many": (prompts(6, length=1, seed=1) + prompts(1, length=120), {}),
    "in chunks": (prompts(7, length=45, seed=2), {"max_batched_tokens": 24}),
    "prefix hits": (prompts(6, length=5, shared=67), {"max_num_seqs": 2}),
    "preempted, of mixed sizes": (prompts(9), {"num_blocks": 60}),
}


def requests_of(name, num=None, **sampling):
    return [
        request_of(f"r{idx}", prompt, 100 + idx, **{"max_tokens": 10, **sampling})
        for idx, prompt in enumerate(SCENARIOS[name][0][:num])
    ]


def shape_of(name, block_size=4, mode="tree-8"):
    shape = EngineShape(mode=mode, **SCENARIOS[name][1])
    num_blocks = -(-shape.num_blocks * 4 // block_size)
    return dataclasses.replace(shape, block_size=block_size, num_blocks=num_blocks)


def replaying_engine(shape, target, drafter, backend):
    """Return a prepared engine that fails where a prefill is not a replay."""
    engine = build_engine(target, drafter, shape, backend=backend)
    prefill = engine._runner.prefill
    if not target.embed_tokens.weight.is_cuda:
        prefill._recorder = RerunRecorder()
    engine.prepare()

    def fail(chunks):
        raise AssertionError(f"{len(chunks)} chunks ran uncaptured")

    prefill._step.run = fail
    return engine


def check_scenario(name, target, backend, block_size=4, num=None, **draft):
    """Check that replays emit what uncaptured prefills do, and leave the same K/V and features."""
    asked, shape = requests_of(name, num), shape_of(name, block_size)
    exact = build_engine(target, build_drafter(shape, target, backend, **draft), shape, backend=backend)
    expected = run(exact, asked)
    engine = replaying_engine(shape, target, build_drafter(shape, target, backend, **draft), backend)
    assert run(engine, asked) == expected
    assert engine._runner.prefill.num_replays > 0
    assert exact._runner.prefill.num_replays == 0
    stats = engine.stats()
    assert (stats.num_prefix_hit_tokens > 0) == (name == "prefix hits"), stats
    assert (stats.num_preemptions > 0) == (name == "preempted, of mixed sizes"), stats
    assert stats.num_drafted > 0
    for found, right in zip(engine._runner.page_pools, exact._runner.page_pools, strict=True):
        # Block 0 takes what padding stores.
        torch.testing.assert_close(found.k[:, 1:], right.k[:, 1:], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.v[:, 1:], right.v[:, 1:], atol=1e-4, rtol=1e-4)
    found, right = (item._runner._state.tables for item in (engine, exact))
    assert torch.equal(found.tokens[1:, :-1], right.tokens[1:, :-1])
    torch.testing.assert_close(found.features[1:, :-1], right.features[1:, :-1], atol=1e-4, rtol=1e-4)
