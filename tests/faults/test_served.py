"""Kinds of faults that show only through a whole server: each test is named for its kind in `kinds`."""

import asyncio
import gc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.faults.served import MODEL_LEN, PINNED, Served, text_and_acceptance

pytestmark = pytest.mark.asyncio(loop_scope="session")

DRAWN = {"prompt": [20, 40, 60], "max_tokens": 24, "ignore_eos": True, "temperature": 1, "seed": 3}
ENDS_AT_ONCE = DRAWN | {"ignore_eos": False, "logit_bias": {"1": 100}}
SAYS_ONE_TOKEN = DRAWN | {"logit_bias": {"70": 100}}
STOPS = SAYS_ONE_TOKEN | {"stop": "ee"}  # what token 70 says, twice
SAYS_SPECIAL = DRAWN | {"logit_bias": {"0": 100}}


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (DRAWN, "temperature", 0),
        (DRAWN, "top_p", 1e-6),
        (DRAWN, "top_k", 1),
        (DRAWN, "min_p", 1.0),
        (DRAWN, "seed", 4),
        (DRAWN, "max_tokens", 5),
        (DRAWN, "n", 2),
        (DRAWN, "echo", True),
        (DRAWN, "stop", ["\ufffd"]),
        (DRAWN, "logit_bias", {"70": 100}),
        (SAYS_ONE_TOKEN | {"logit_bias": {"70": 8}}, "presence_penalty", 2),
        (SAYS_ONE_TOKEN | {"logit_bias": {"70": 8}}, "frequency_penalty", 2),
        (SAYS_ONE_TOKEN | {"logit_bias": {"70": 8}}, "repetition_penalty", 10),
        (ENDS_AT_ONCE, "min_tokens", 10),
        (ENDS_AT_ONCE, "ignore_eos", True),
        (SAYS_ONE_TOKEN, "stop_token_ids", [70]),
        (STOPS, "include_stop_str_in_output", True),
        (SAYS_SPECIAL, "skip_special_tokens", False),
    ],
)
async def test_param_dropped(served: Served, base: dict[str, Any], field: str, value: object) -> None:
    """A field set to an extreme changes the answer, the same with and without speculation."""
    before = await served.complete(**base)
    after = await served.complete(**base | {field: value})
    plain = await served.complete(**base | {field: value, "speculation": "off"})
    assert after["choices"] != before["choices"]
    assert after["choices"] == plain["choices"]


async def test_tokens_not_counted(served: Served) -> None:
    """What the counters gained is what the answers say that they used."""
    before = await served.stats()
    asked = [DRAWN, SAYS_ONE_TOKEN, STOPS, ENDS_AT_ONCE, DRAWN | {"n": 3}, DRAWN | {"speculation": "off"}]
    bodies = await asyncio.gather(*(served.complete(**fields) for fields in asked))
    after = await served.stats()
    num_tokens = sum(body["usage"]["completion_tokens"] for body in bodies)
    # The engine runs on behind a stop string until it is told; that is at most what its steps in flight gave.
    assert num_tokens <= after.num_output_tokens - before.num_output_tokens <= num_tokens + 24
    assert after.num_finished - before.num_finished == len(asked) + 2
    assert after.num_aborted == before.num_aborted


async def test_rate_over_one(served: Served) -> None:
    """No statistic of speculation leaves its range, and the histogram adds up to the rates."""
    rates = []
    for fields in PINNED:
        stats = (await served.complete(**fields))["metrics"]["speculative_decoding"]
        rates.append(stats["draft_acceptance_rate"])
        assert 0 <= rates[-1] <= 1
        assert 1 <= stats["mean_acceptance_length"] <= stats["num_spec_tokens"] + 1
        histogram = stats["acceptance_histogram"]
        assert sum(histogram) == stats["num_spec_steps"]
        assert sum(kept * count for kept, count in enumerate(histogram)) == stats["num_accepted_draft_tokens"]
    assert 0 < max(rates) < 1


async def test_accept_falls_with_batch(served: Served) -> None:
    """A request keeps as many drafts in a batch of others as alone."""
    alone = [text_and_acceptance(await served.complete(**fields)) for fields in PINNED]
    together = await asyncio.gather(*(served.complete(**fields) for fields in PINNED))
    assert [text_and_acceptance(body) for body in together] == alone
    assert any(len(histogram) > 1 for _, histogram in alone), "no draft was ever kept"


async def test_acceptance_poisoned(served: Served) -> None:
    """After what is at the edge the pinned prompts keep as many drafts as before."""
    before = [text_and_acceptance(await served.complete(**fields)) for fields in PINNED]
    prompt = [30 + idx % 200 for idx in range(MODEL_LEN - 20)]
    to_the_end = await served.complete(**DRAWN | {"prompt": prompt, "max_tokens": 20})
    assert to_the_end["usage"]["total_tokens"] == MODEL_LEN
    crowd = [
        asyncio.create_task(served.complete(**DRAWN | {"seed": idx, "max_tokens": 60})) for idx in range(10)
    ]
    await asyncio.sleep(0.3)
    for task in crowd[::2]:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    await served.stats()
    assert [text_and_acceptance(await served.complete(**fields)) for fields in PINNED] == before


async def test_seed_parallel_gibberish(served: Served) -> None:
    """Five seeds at once say what they say alone; one seed given twice says one thing."""
    asked = [DRAWN | {"seed": seed} for seed in (*range(5), 0)]
    alone = [(await served.complete(**fields))["choices"] for fields in asked]
    together = await asyncio.gather(*(served.complete(**fields) for fields in asked))
    assert [body["choices"] for body in together] == alone
    assert alone[0] == alone[5]
    assert len({choices[0]["text"] for choices in alone}) == 5


async def test_slow_growth(served: Served) -> None:
    """Short requests leave nothing behind: no object here, no page in the core.

    Memory may grow in jumps, as for a shape that is new; a leak grows in every part of the run.
    """
    pid = served.server._engine._link.process.pid
    num_objects, num_pages = [], []
    for part in range(6):
        for start in range(0, 96, 16):
            fields = [DRAWN | {"seed": 1000 * part + start + idx, "max_tokens": 2} for idx in range(16)]
            await asyncio.gather(*(served.complete(**body) for body in fields))
        await served.stats()
        gc.collect()
        num_objects.append(len(gc.get_objects()))
        num_pages.append(resident_pages(pid))
    assert min(after - before for before, after in pairwise(num_objects)) < 40, num_objects
    assert min(after - before for before, after in pairwise(num_pages)) < 40, num_pages


def resident_pages(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
