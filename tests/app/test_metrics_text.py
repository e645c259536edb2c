"""The Prometheus text: valid, complete, and equal to what the engine counted."""

import asyncio
import itertools
import re
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app import metrics_page
from app.admission import Admission
from app.api_keys import ApiKeys
from app.chat import ChatTemplate
from app.choices import Limits
from app.ingress import FrontDoor, Ingress
from app.metrics import COUNTERS, HISTOGRAM_ALIASES, HISTOGRAMS, Histogram, Labelled
from app.outcomes import OUTCOMES
from app.server import LLMServer
from app.tokenizer import Tokenizer
from engine import (
    CapacityError,
    DraftState,
    DraftStatus,
    EngineDeadError,
    FinishReason,
    Request,
    SequenceDelta,
)
from tests.app.harness import LocalBackend, SpokenEngine, chat_body, client_of, make_application

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(client: httpx.AsyncClient) -> Samples:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model", "replica", "ingress")}
            samples[sample.name, frozenset(labels.items())] = sample.value
            assert ("ingress" in sample.labels) != (sample.labels.get("model") == "tiny")
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
    assert value("vllm:spec_decode_num_draft_tokens_total") == 60
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


async def test_page_lists_exactly_what_is_exported(client: httpx.AsyncClient, engine: SpokenEngine) -> None:
    engine.draft = DraftStatus("d1", DraftState.SERVING)
    await client.post("/v1/chat/completions", json=chat_body())
    exported = {}
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name not in exported
        labels = {label for sample in family.samples for label in sample.labels}
        exported[name] = (family.type, labels - {"model", "replica", "le"})
    listed = {
        name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in metrics_page.rows()
    }
    assert listed == exported


def test_page_is_the_one_in_the_documents(pytestconfig: pytest.Config) -> None:
    written = (pytestconfig.rootpath / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == metrics_page.page(), "run python -m app.metrics_page > docs/metrics.md"


async def test_queries_of_the_page_ask_for_names_that_exist(client: httpx.AsyncClient) -> None:
    known = {name for name, *_ in metrics_page.rows()}
    section = metrics_page.page().partition("## What to ask")[2]
    asked = set(re.findall(r"(?:eyas_|vllm:)\w+", section))
    assert len(asked) > 15
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} <= known


async def test_path_lengths_add_up_to_the_drafts_that_were_kept(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    engine.draft = DraftStatus("d1", DraftState.SERVING)
    samples = await scrape(client)

    def value(part: str, **labels: str) -> float:
        return samples[
            f"eyas_accepted_path_length_{part}", frozenset({**labels, "draft_digest": "d1"}.items())
        ]

    # Of 18 rows 15 kept one draft or more, 7 two, 3 three.
    rows = [value("bucket", le=str(length)) for length in range(4)]
    assert rows == [3, 11, 15, 18]
    assert value("count") == value("bucket", le="+Inf") == 18
    lengths = [rows[0], *(right - left for left, right in itertools.pairwise(rows))]
    assert value("sum") == sum(length * count for length, count in enumerate(lengths)) == 25


async def test_steps_are_counted_by_their_rows_and_by_their_time(client: httpx.AsyncClient) -> None:
    samples = await scrape(client)

    def value(name: str, **labels: str) -> float:
        return samples[name, frozenset(labels.items())]

    def within(name: str, *bounds: str) -> list[float]:
        return [value(f"{name}_bucket", le=bound) for bound in bounds]

    # Eight steps of one row, one of two, and one of a prompt only.
    assert within("eyas_batch_size", "1", "2", "4", "256", "+Inf") == [8, 9, 9, 9, 9]
    assert value("eyas_batch_size_count") == value("eyas_steps_total") - 1
    assert value("eyas_batch_size_sum") == value("eyas_decode_rows_total") == 10
    # Four steps took over 1 and up to 2 ms, five up to 200 ms, one more than 5 s.
    bounds = ("0.001", "0.002", "0.1", "0.2", "5", "+Inf")
    assert within("eyas_step_time_seconds", *bounds) == [0, 4, 4, 9, 9, 10]
    assert value("eyas_step_time_seconds_count") == value("eyas_steps_total")
    assert value("eyas_step_time_seconds_sum") == value("eyas_step_seconds_total")


async def test_answers_of_the_front_are_counted_by_path_and_status(
    engine: SpokenEngine, tokenizer: Tokenizer, model_folder: Path
) -> None:
    door = FrontDoor(100_000, keys=ApiKeys(["secret"]))
    async with client_of(
        make_application(engine, tokenizer, ChatTemplate(model_folder), door=door)
    ) as client:
        chat, key = "/v1/chat/completions", {"authorization": "Bearer secret"}
        await client.post(chat, json=chat_body())
        await client.post(chat, json=chat_body(), headers=key)
        await client.post(chat, json=chat_body(stream=True), headers=key)
        await client.post(chat, json=chat_body(top_p=5), headers=key)
        for idx in range(3):
            await client.get(f"/no/{idx}", headers=key)
        samples = await scrape(client)
    counts = {
        (labels["path"], labels["status"]): value
        for name, pairs in samples
        if name == "eyas_http_responses_total"
        for labels, value in [(dict(pairs), samples[name, pairs])]
    }
    assert counts == {(chat, "401"): 1, (chat, "200"): 2, (chat, "400"): 1, ("other", "404"): 3}


async def test_busy_seconds_count_overlapping_calls_once() -> None:
    now = 0.0
    admission = Admission(lambda: now)
    with admission.hold(1, 8, None):
        now = 2.0
        with admission.hold(1, 8, None):
            now = 3.0
        now = 5.0
        assert admission.busy_seconds == 5
    now = 100.0
    with admission.hold(1, 8, None):
        now = 101.0
    assert admission.busy_seconds == 6


@pytest.mark.parametrize(("alias", "name"), HISTOGRAM_ALIASES.items())
async def test_alias_of_a_histogram_counts_the_same(client: httpx.AsyncClient, alias: str, name: str) -> None:
    await client.post("/v1/chat/completions", json=chat_body())
    samples = await scrape(client)
    own, other = (
        {key: value for (sample, key), value in samples.items() if sample.startswith(prefix)}
        for prefix in (alias, name)
    )
    assert own == other
    assert max(own.values()) >= 1


async def test_calls_are_timed_once(client: httpx.AsyncClient) -> None:
    await client.post("/v1/chat/completions", json=chat_body())
    await client.post("/v1/chat/completions", json=chat_body(n=2, stream=True))
    samples = await scrape(client)
    assert samples["eyas_time_to_first_token_seconds_count", frozenset()] == 2
    assert samples["eyas_call_duration_seconds_count", frozenset()] == 2
    assert samples["eyas_time_per_output_token_seconds_count", frozenset()] == 3
    assert samples["eyas_queue_time_seconds_count", frozenset()] == 3


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


async def test_first_token_and_time_per_token_make_the_whole_time(
    tokenizer: Tokenizer, model_folder: Path
) -> None:
    now = 0.0

    class TimedEngine(SpokenEngine):
        async def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
            nonlocal now
            async for delta in super().generate(request):
                now += 0.25  # each step, of 3 tokens but for the last
                yield delta._replace(started=0.0625)

    template, engine = ChatTemplate(model_folder), TimedEngine(tokenizer)
    server = LLMServer(engine, tokenizer, template, "tiny", Limits(8), clock=lambda: now)
    async with client_of(Ingress(LocalBackend(server), "0", FrontDoor(10_000)).build()) as client:
        await client.post("/v1/chat/completions", json=chat_body())
        samples = await scrape(client)

    def total(name: str) -> float:
        return samples[f"eyas_{name}_seconds_sum", frozenset()]

    assert total("queue_time") == 0.0625
    assert total("time_to_first_token") == 0.25
    assert total("call_duration") == samples["eyas_busy_seconds_total", frozenset()] == 1.25
    assert total("time_per_output_token") == pytest.approx((1.25 - 0.25) / (13 - 3))


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
