"""The Prometheus text: valid, complete, and equal to what the engine counted."""

import asyncio

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import CALLS, COUNTERS, GAUGES, HISTOGRAMS, Histogram, Labelled
from app.outcomes import OUTCOMES
from engine import CapacityError, EngineDeadError, FinishReason, SequenceDelta
from tests.app.harness import SpokenEngine, chat_body

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(client: httpx.AsyncClient) -> Samples:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model", "replica")}
            samples[sample.name, frozenset(labels.items())] = sample.value
            assert sample.labels["model"] == "tiny"
    return samples


async def test_numbers_are_those_of_the_engine(client: httpx.AsyncClient) -> None:
    samples = await scrape(client)

    def value(name: str, **labels: str) -> float:
        return samples[name, frozenset(labels.items())]

    assert value("eyas_kv_blocks", state="free") == 30
    assert value("eyas_kv_blocks", state="held") == 2
    assert value("eyas_kv_blocks", state="cached") == 1
    assert value("eyas_verification_calls_total") == 20
    assert value("eyas_generation_tokens_total") == 45
    assert value("eyas_accepted_draft_tokens_by_depth_total", depth="1") == 15
    assert value("eyas_steps_by_tree_total", tree="chain-3") == 8
    assert value("eyas_drafts_total") == value("vllm:spec_decode_num_drafts_total") == 18
    assert value("vllm:spec_decode_num_accepted_tokens_total") == 25
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="0") == 15
    assert value("vllm:kv_cache_usage_perc") == pytest.approx(2 / 33)


async def test_the_choice_of_the_dispatcher_is_told(client: httpx.AsyncClient) -> None:
    samples = await scrape(client)
    found = {
        (name.removeprefix("eyas_"), *(value for _, value in labels)): number
        for (name, labels), number in samples.items()
        if name.startswith(("eyas_dispatch", "eyas_arm"))
    }
    assert found == {
        ("dispatch_arm", "chain-3"): 1,
        ("dispatch_reason", "best"): 1,
        ("dispatch_expected_tokens_per_second", "chain-3"): 360,
        ("dispatch_expected_tokens_per_second", "off"): 64,
        ("dispatch_switches_total",): 5,
        ("dispatch_probes_total",): 4,
        ("dispatch_alarms_total",): 3,
        ("dispatch_trips_total",): 2,
        ("arm_steps_total", "chain-3"): 40,
        ("arm_steps_total", "off"): 4,
        ("arm_tokens_total", "chain-3"): 900,
        ("arm_tokens_total", "off"): 32,
        ("arm_seconds_total", "chain-3"): 2.5,
        ("arm_seconds_total", "off"): 0.5,
    }


async def test_every_name_of_the_catalogue_is_written(client: httpx.AsyncClient) -> None:
    names = {name for name, _ in await scrape(client)}
    expected = {metric.name for metric in (*GAUGES, *COUNTERS)}
    expected |= {f"{name}_bucket" for name in HISTOGRAMS} | {CALLS[0]}
    assert expected <= names


async def test_calls_are_timed_once(client: httpx.AsyncClient) -> None:
    await client.post("/v1/chat/completions", json=chat_body())
    await client.post("/v1/chat/completions", json=chat_body(n=2, stream=True))
    samples = await scrape(client)
    assert samples["eyas_time_to_first_token_seconds_count", frozenset()] == 2
    assert samples["eyas_call_duration_seconds_count", frozenset()] == 2
    assert samples["eyas_time_per_output_token_seconds_count", frozenset()] == 3


async def test_calls_are_counted_by_how_they_end(client: httpx.AsyncClient, engine: SpokenEngine) -> None:
    chat = "/v1/chat/completions"
    for is_stream in (True, False):
        await client.post(chat, json=chat_body(stream=is_stream))
        await client.post(chat, json=chat_body(stream=is_stream, model="other"))
    engine.start_error = CapacityError("full")
    await client.post(chat, json=chat_body())
    engine.start_error = EngineDeadError("gone")
    await client.post(chat, json=chat_body())
    engine.start_error = None
    engine.failure = SequenceDelta("r", (), 0, FinishReason.ERROR, 2, 0, 0, 0, message="no numbers")
    await client.post(chat, json=chat_body(stream=True))
    engine.failure, engine.num_steps_before_stall = None, 1
    call = asyncio.create_task(client.post(chat, json=chat_body()))
    while not engine.running:
        await asyncio.sleep(0.001)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    samples = await scrape(client)
    counts = {outcome: samples["eyas_calls_total", frozenset({("outcome", outcome)})] for outcome in OUTCOMES}
    assert counts == {"answered": 2, "refused": 2, "full": 1, "failed": 2, "left": 1}


@pytest.mark.parametrize("metric", COUNTERS, ids=lambda metric: metric.name)
def test_counter_is_named_total(metric: Labelled) -> None:
    assert metric.name.endswith("_total")


def test_histogram_counts_a_value_on_a_bound_below_it() -> None:
    name = "eyas_call_duration_seconds"
    bounds = HISTOGRAMS[name][1]
    histogram = Histogram(name)
    for value in (bounds[0], bounds[0] * 1.01, bounds[-1] * 2):
        histogram.observe(value)
    counts = histogram.snapshot().counts
    assert (counts[0], counts[1], counts[-1], sum(counts)) == (1, 1, 1, 3)
