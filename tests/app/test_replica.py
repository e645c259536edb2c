"""A replica with a real engine core: its start is timed, its draft changes under running streams, and its
status and metrics tell of both.
"""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from app.admin import status_body
from app.autoscaling import ReplicaFigures, read_figures
from app.config import ServerConfig, load_config
from app.http_counts import ResponseCounts
from app.metrics import render
from app.protocol import parse_completion
from app.replica import Replica
from engine import DraftState
from engine.draft.head import DraftHead
from engine.draft.loader import load_draft, save_draft
from tests.app.harness import events
from tests.app.tiny_model import MAX_POSITION, write_random_draft, write_random_model

NUM_TOKENS = 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("replica")
    write_random_model(root)
    write_random_draft(root / "draft")
    config = load_draft(root / "draft").config
    torch.manual_seed(9)
    save_draft(DraftHead(config, num_positions=MAX_POSITION, dtype=torch.float32), root / "other", {})
    (root / "broken").mkdir()
    (root / "broken" / "manifest.json").write_text("{}")
    return root


@pytest.fixture
def config(folder: Path) -> ServerConfig:
    keys = {
        "model": str(folder),
        "served_model_name": "tiny",
        "draft": str(folder / "draft"),
        "engine.dtype": "float32",
        "engine.num_threads": 1,
        "engine.memory_gib": 0.01,
        "engine.speculation.mode": "chain-3",
    }
    return load_config(None, keys)


@pytest.fixture
async def replica(config: ServerConfig) -> AsyncIterator[Replica]:
    started = await Replica.start(config, "replica-1")
    yield started
    await started.shutdown()


async def stream(replica: Replica, seed: int, temperature: float) -> str:
    body = {
        "model": "tiny",
        "prompt": [10, 20, 30, seed + 40],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
    }
    call = parse_completion(json.dumps(body).encode())
    parts = [part async for part in replica.server.answer(call, f"call-{seed}")]
    chunks = events(b"".join(part for part in parts if isinstance(part, bytes)).decode())
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def until(replica: Replica, state: DraftState, num_changes: int) -> None:
    async with asyncio.timeout(20):
        while True:
            draft = (await replica.snapshot()).stats.draft
            if draft.state is state and draft.num_swaps + draft.num_refused == num_changes:
                return
            await asyncio.sleep(0.01)


async def test_streams_outlive_changes_and_say_the_same(replica: Replica, folder: Path) -> None:
    async def all_streams() -> list[str]:
        return await asyncio.gather(*(stream(replica, seed, 0.8 * (seed % 2)) for seed in range(6)))

    expected = await all_streams()
    changed = asyncio.create_task(all_streams())
    for num_changes, (values, state) in enumerate(
        [
            ({"draft": str(folder / "other")}, DraftState.SERVING),
            ({"draft": str(folder / "broken")}, DraftState.REFUSED),
            ({"draft": str(folder / "other"), "speculation": "tree-8"}, DraftState.SERVING),
            ({}, DraftState.SERVING),
        ],
        start=1,
    ):
        await asyncio.sleep(0.02)
        replica.live.apply(values)
        await until(replica, state, num_changes)
    assert await changed == expected
    snapshot = await replica.snapshot()
    assert (snapshot.stats.draft.num_swaps, snapshot.stats.draft.num_refused) == (3, 1)
    assert snapshot.stats.draft.digest == load_draft(folder / "draft").digest
    assert snapshot.stats.num_held_blocks == 0
    text = render([snapshot], ResponseCounts("front", frozenset())).decode()
    labels = 'model="tiny",replica="replica-1"'
    assert f"eyas_draft_swaps_total{{{labels}}} 3.0" in text
    assert f"eyas_draft_refusals_total{{{labels}}} 1.0" in text
    assert f'eyas_draft_state{{{labels},state="serving"}} 1.0' in text
    assert f'eyas_draft_state{{{labels},state="refused"}} 0.0' in text
    assert f'draft_digest="{snapshot.stats.draft.digest}"' in text


async def test_a_replica_tells_what_it_runs_and_how_long_its_start_took(
    replica: Replica, config: ServerConfig, folder: Path
) -> None:
    snapshot = await replica.snapshot()
    ready = dataclasses.asdict(snapshot.ready)
    assert set(ready) == {"model", "load", "capture", "first_token"}
    assert all(seconds > 0 for seconds in ready.values())
    assert snapshot.ready.total == pytest.approx(sum(ready.values()))
    text = render([snapshot], ResponseCounts("front", frozenset())).decode()
    assert f'eyas_ready_seconds{{model="tiny",phase="load",replica="replica-1"}} {ready["load"]}' in text
    body = json.loads(json.dumps(status_body([snapshot], config.model_dump(mode="json"))))
    assert body["configuration"]["engine"]["dtype"] == "float32"
    (told,) = body["replicas"]
    assert told["draft"]["digest"] == load_draft(folder / "draft").digest
    assert told["draft"]["state"] == "serving"
    assert told["live"]["wanted"]["speculation"] == "chain-3"
    assert told["live"]["refusals"] == {}
    assert "tree-8" in told["arms"]["known"]
    assert told["memory"]["num_free"] + told["memory"]["num_cached"] == told["memory"]["num_blocks"]
    assert told["ready_seconds"]["total"] == pytest.approx(snapshot.ready.total)


async def test_figures_are_those_that_policy_and_router_read(replica: Replica) -> None:
    await replica.scaling_figures()
    running = [asyncio.create_task(stream(replica, seed, 0.0)) for seed in range(3)]
    await asyncio.sleep(0.05)
    figures = await replica.scaling_figures()
    (read,) = read_figures({name: {"replica-1": value} for name, value in figures.items()})
    assert isinstance(read, ReplicaFigures)
    assert read.num_running + read.num_waiting == 3
    assert 1 <= read.capacity <= 32
    assert read.ready_seconds == (await replica.snapshot()).ready.total
    routing = await replica.routing_figures()
    assert routing["num_running"] + routing["num_waiting"] <= 3
    assert routing["capacity"] >= 1
    await asyncio.gather(*running)


async def test_limits_hold_for_calls_after_the_change(replica: Replica) -> None:
    replica.live.apply({"max_prompt_tokens": 3})
    call = parse_completion(b'{"model": "tiny", "prompt": [1, 2, 3, 4], "max_tokens": 1}')
    (reply,) = [part async for part in replica.server.answer(call, "a")]
    assert not isinstance(reply, bytes)
    assert reply.status == 400
    replica.live.apply({})
    (reply,) = [part async for part in replica.server.answer(call, "b")]
    assert not isinstance(reply, bytes)
    assert reply.status == 200
