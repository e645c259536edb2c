"""A server under test, and what is asked of it."""

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx

from app.server import LLMServer
from engine import EngineStats

MODEL_LEN = 256
PINNED: tuple[dict[str, Any], ...] = tuple(
    {
        "prompt": [20 + idx, 40, 60 + idx],
        "max_tokens": 24,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": idx,
    }
    for idx in range(5)
)


@dataclass(frozen=True)
class Served:
    server: LLMServer
    client: httpx.AsyncClient

    async def complete(self, **fields: object) -> dict[str, Any]:
        """Return the body of a completion, with its statistics of speculation over tree-8."""
        body = {"model": "tiny", "speculation": "tree-8", "speculation_stats": True} | fields
        response = await self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def stats(self) -> EngineStats:
        """Return the engine's counters once nothing runs; every block is then back."""
        for _ in range(500):
            stats = (await self.server.snapshot()).stats
            if not stats.num_running and not stats.num_waiting:
                assert stats.num_held_blocks == 0
                return stats
            await asyncio.sleep(0.01)
        raise AssertionError(stats)


def text_and_acceptance(body: dict[str, Any]) -> tuple[str, list[int]]:
    """Return what a completion said and how many steps kept how many drafts."""
    return body["choices"][0]["text"], body["metrics"]["speculative_decoding"]["acceptance_histogram"]
