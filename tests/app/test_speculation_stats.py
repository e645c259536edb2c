"""Statistics of speculation of one call: sums over its steps, and only where asked for."""

import httpx
import pytest

from app.speculation_stats import SpeculationStats
from tests.app.harness import SpokenEngine, chat_body, completion_body, events

CHAT = "/v1/chat/completions"


def test_steps_are_counted_by_the_drafts_they_kept_and_plain_ones_are_not() -> None:
    stats = SpeculationStats()
    for num_drafted, num_accepted in ((7, 3), (0, 0), (7, 0), (2, 1), (7, 3)):
        stats.observe(num_drafted, num_accepted)
    assert stats.body() == {
        "mean_acceptance_length": 1 + 7 / 4,
        "draft_acceptance_rate": 7 / 23,
        "acceptance_histogram": [1, 1, 0, 2],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 7,
        "num_draft_tokens": 23,
        "num_spec_tokens": 7,
    }


def test_plain_decoding_has_no_rates() -> None:
    body = SpeculationStats().body()
    assert (body["num_spec_steps"], body["acceptance_histogram"]) == (0, [])
    assert body["mean_acceptance_length"] is None
    assert body["draft_acceptance_rate"] is None


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_whole_answer_carries_them_beside_usage(
    client: httpx.AsyncClient, engine: SpokenEngine, num_choices: int
) -> None:
    response = await client.post(CHAT, json=chat_body(speculation_stats=True, n=num_choices))
    stats = response.json()["metrics"]["speculative_decoding"]
    # "Hello, world" and its end in runs of 3, 3, 3, 3 and 1 tokens
    assert stats["acceptance_histogram"] == [num_choices, 0, 4 * num_choices]
    assert stats["num_draft_tokens"] == 5 * 4 * num_choices
    num_tokens = response.json()["usage"]["completion_tokens"]
    assert stats["mean_acceptance_length"] == pytest.approx(num_tokens / stats["num_spec_steps"])


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
async def test_stream_carries_them_on_its_last_event(
    client: httpx.AsyncClient, options: dict[str, object] | None
) -> None:
    body = completion_body(stream=True, speculation_stats=True, stream_options=options)
    chunks = events((await client.post("/v1/completions", json=body)).text)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] == 5
    assert ("usage" in chunks[-1]) == (options is not None)
    assert not any("metrics" in chunk for chunk in chunks[:-1])


async def test_answer_is_silent_about_them_unless_asked(client: httpx.AsyncClient) -> None:
    assert "metrics" not in (await client.post(CHAT, json=chat_body())).json()
    streamed = (await client.post(CHAT, json=chat_body(stream=True))).text
    assert "metrics" not in streamed


async def test_priority_reaches_the_engine(client: httpx.AsyncClient, engine: SpokenEngine) -> None:
    await client.post(CHAT, json=chat_body(priority=-3, user="somebody"))
    await client.post(CHAT, json=chat_body())
    assert [request.priority for request in engine.requests] == [-3, 0]
