"""Another draft takes the place of the serving one under running sequences: no token changes, and nothing
that the old one cached is read. What cannot serve is told, and the old one serves on.
"""

import dataclasses
import json
import time

import pytest
import torch

from engine.config import SpeculationConfig
from engine.draft.drafter import Drafter
from engine.draft.loader import load_draft, save_draft
from engine.draft.network import create_network
from engine.draft_status import DraftState
from engine.engine import Engine
from tests.exactness.folder import engine_config, write_draft, write_target
from tests.exactness.tiny import EngineShape, build_engine, build_target, collect, prompts, request_of, run

TARGET = build_target()
SECONDS = 20.0


def write_variant(folder, source, seed, **changes):
    """Write a head like that of `source` with other random weights, as often right."""
    config = dataclasses.replace(load_draft(source).config, **changes)
    torch.manual_seed(seed)
    head = create_network(config, num_positions=8, dtype=torch.float32)
    with torch.no_grad():
        head.fc.weight.copy_(torch.eye(config.hidden_size).repeat(1, len(config.taps)))
    save_draft(head, folder, {"made_by": "a test"}, dtype=torch.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return folders by name: the target, three drafts of which `wide` has pages of its own shape, and drafts
    that cannot serve.
    """
    root = tmp_path_factory.mktemp("swap")
    names = ("target", "first", "second", "wide", "taps", "narrow", "nan", "corrupt", "other")
    found = {name: root / name for name in names}
    write_target(found["target"])
    write_draft(found["first"], found["target"])
    write_variant(found["second"], found["first"], seed=5)
    write_variant(found["wide"], found["first"], seed=6, num_layers=2, num_kv_heads=4)
    write_variant(found["taps"], found["first"], seed=7, taps=(0,))
    write_variant(found["narrow"], found["first"], seed=7, draft_vocab_size=2)
    write_variant(found["other"], found["first"], seed=7, base_model_digest="0" * 64)
    write_variant(found["nan"], found["first"], seed=8)
    poison(found["nan"])
    write_variant(found["corrupt"], found["first"], seed=8)
    (found["corrupt"] / "model.safetensors").write_bytes(b"short")
    return found


def poison(folder):
    """Put one NaN into the weights of a draft folder, and its true digest into the manifest."""
    loaded = load_draft(folder)
    head = create_network(loaded.config, num_positions=8, dtype=torch.float32)
    head.fc.weight.data[0, 0] = float("nan")
    save_draft(head, folder, {"made_by": "a test"}, dtype=torch.float32)


def load(folders, **changes) -> Engine:
    speculation = SpeculationConfig(mode=changes.pop("mode", "tree-8"))
    return Engine.load(engine_config(folders["target"], folders["first"], speculation=speculation, **changes))


def wait(engine, act=lambda: None):
    """Act, and look, until the draft asked for is in place or refused."""
    end = time.monotonic() + SECONDS
    while engine.stats().draft.state is DraftState.LOADING:
        assert time.monotonic() < end, "the draft is not read in time"
        act()


def swap(engine, folder, digest=None):
    """Ask for a draft and wait for it without a step."""
    engine.drafts.load(folder, digest)
    wait(engine)
    return engine.stats().draft


def plain(asked):
    return {
        name: text
        for request in asked
        for name, text in run(build_engine(TARGET, None, EngineShape()), [request]).items()
    }


def asked_of(num, temperature):
    # Of shared beginnings, so that prefixes are hit before, between and after the swaps.
    return [
        request_of(f"r{idx}", prompt, 100 + idx, temperature=temperature, max_tokens=60)
        for idx, prompt in enumerate(prompts(num, length=5, shared=11))
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("budget", [256, 12])
def test_streams_across_several_swaps_emit_what_plain_decoding_does(folders, temperature, budget):
    asked = asked_of(9, temperature)
    engine = load(folders, max_batched_tokens=budget, max_num_seqs=4)
    outputs = {request.request_id: [] for request in asked}
    waiting, digests = list(asked), []
    names = ["second", "wide", "first", "second"]
    num_steps = 0
    while engine.has_work or waiting:
        if waiting and num_steps % 5 == 0:
            engine.add(waiting.pop(0))
        if names and num_steps % 17 == 8:
            digests.append(swap(engine, folders[names.pop(0)]).digest)
        for delta in engine.step():
            collect(outputs, delta)
        num_steps += 1
    assert {name: tuple(text) for name, text in outputs.items()} == plain(asked)
    assert len(digests) == 4
    assert len(set(digests)) == 3
    stats = engine.stats()
    assert (stats.draft.num_swaps, stats.draft.state) == (4, DraftState.SERVING)
    assert 0 < stats.draft.num_accepted < stats.num_accepted, "counted anew for each draft"
    assert stats.num_held_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == engine.facts.num_blocks


def step(engine, outputs, num_steps=10_000):
    for _ in range(num_steps):
        if not engine.has_work:
            return
        for delta in engine.step():
            collect(outputs, delta)


def drafts_after_a_swap(folders, monkeypatch, noise, swap_at, budget):
    """Return every tree that was drafted after a swap, where the old draft's pages held `noise` by then, and
    the windows that were read.
    """
    engine = load(folders, max_batched_tokens=budget)
    pool = engine.drafts._site._drafter.pool
    drafted, starts = [], []
    draft, align = Drafter.draft, Drafter._align

    def watch_draft(self, window, tree, noise, output):
        draft(self, window, tree, noise, output)
        drafted.append(output.token_ids.tolist())

    def watch_window(self, window):
        starts.extend(window.prefix_start.tolist())
        return align(self, window)

    first, *others = asked_of(4, 0.0)
    outputs = {request.request_id: [] for request in (first, *others)}
    engine.add(first)  # its prefix is hit by the others
    step(engine, outputs)
    for request in others:
        engine.add(request)
    step(engine, outputs, swap_at)
    torch.manual_seed(3)
    for pages in (pool.k, pool.v):
        pages.copy_(torch.randn(pages.shape) * noise)
    assert swap(engine, folders["second"]).state is DraftState.SERVING
    with monkeypatch.context() as patch:
        patch.setattr(Drafter, "draft", watch_draft)
        patch.setattr(Drafter, "_align", watch_window)
        step(engine, outputs)
    return drafted, starts


@pytest.mark.parametrize(("swap_at", "budget"), [(1, 12), (2, 12), (4, 12), (9, 256)])
def test_no_draft_depends_on_what_the_old_draft_had_cached(folders, monkeypatch, swap_at, budget):
    quiet, starts = drafts_after_a_swap(folders, monkeypatch, 0.0, swap_at, budget)
    loud, _ = drafts_after_a_swap(folders, monkeypatch, 3.0, swap_at, budget)
    assert len(quiet) > 8
    assert quiet == loud
    assert any(start > 0 for start in starts), "a window begins behind the swap"


def draft_cache(engine, name, num_positions):
    """Return the first layer's draft K and V of a running sequence, [2, num_positions, Hkv, D]."""
    pool = engine.drafts._site._drafter.pool
    blocks = torch.tensor(engine._scheduler._live[name].sequence.block_ids)
    return torch.stack([pages[0, blocks].flatten(0, 1)[:num_positions] for pages in (pool.k, pool.v)])


@pytest.mark.parametrize(("prompt_len", "budget", "swap_at"), [(6, 256, 3), (30, 256, 6), (40, 12, 2)])
def test_what_the_new_draft_caches_equals_a_fresh_prefill(folders, prompt_len, budget, swap_at):
    (prompt,) = prompts(1, length=prompt_len)
    engine = load(folders, max_batched_tokens=budget, enable_prefix_cache=False)
    outputs = {"r": [], "fresh": []}
    engine.add(request_of("r", prompt, 1, max_tokens=200))
    step(engine, outputs, swap_at)
    swap(engine, folders["second"])
    step(engine, outputs, 12)
    text = (*prompt, *outputs["r"])
    start = int(engine._runner._state.tables.draft_start[1])
    assert start < len(text) - 12
    config = engine_config(folders["target"], folders["second"], enable_prefix_cache=False)
    fresh = Engine.load(dataclasses.replace(config, speculation=SpeculationConfig(mode="off")))
    fresh.add(request_of("fresh", text, 1, max_tokens=4))
    step(fresh, outputs, 1)
    found, expected = (
        draft_cache(*pair, len(text) - 1)[:, start:] for pair in ((engine, "r"), (fresh, "fresh"))
    )
    assert expected.abs().amax((2, 3)).min() > 0.1, "there is something to compare"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_prefix_cached_before_a_swap_is_cached_anew_with_draft(folders):
    engine = load(folders)
    prompt = prompts(1, length=30)[0]
    run(engine, [request_of("before", prompt, 1)])
    swap(engine, folders["second"])
    hits = []
    for name in ("after", "again"):
        run(engine, [request_of(name, prompt, 1)])
        hits.append(engine.stats().num_prefix_hit_tokens)
    assert hits[0] == 0
    assert hits[1] >= 24


@pytest.mark.parametrize(
    ("name", "digest", "named"),
    [
        ("corrupt", None, "has sha256"),
        ("nan", None, "not finite"),
        ("taps", None, "taps"),
        ("narrow", None, "children of a node"),
        ("other", None, "trained on target weights"),
        ("second", "0" * 64, "was asked for"),
        ("missing", None, "manifest"),
    ],
)
def test_a_draft_that_cannot_serve_is_told_and_the_old_one_serves_on(
    folders, tmp_path, name, digest, named, caplog
):
    engine = load(folders)
    asked = asked_of(2, 0.0)
    outputs = {request.request_id: [] for request in asked}
    before = engine.stats().draft.digest
    for request in asked:
        engine.add(request)
    engine.drafts.load(folders.get(name, tmp_path / name), digest)

    wait(engine, lambda: step(engine, outputs, 1))
    step(engine, outputs)
    status = engine.stats().draft
    assert (status.state, status.digest, status.num_refused) == (DraftState.REFUSED, before, 1)
    assert named in status.message
    assert not status.is_off
    assert {key: tuple(text) for key, text in outputs.items()} == plain(asked)
    assert status.num_accepted > 0
    assert swap(engine, folders["second"]).state is DraftState.SERVING, "the next one is taken"


def test_an_engine_without_a_draft_takes_none(folders):
    engine = Engine.load(engine_config(folders["target"]))
    assert engine.stats().draft.state is DraftState.NONE
    status = swap(engine, folders["first"])
    assert status.state is DraftState.REFUSED
    assert "without a draft" in status.message


def test_the_last_draft_asked_for_is_the_one_that_serves(folders):
    engine = load(folders)
    engine.drafts.load(folders["wide"], None)
    status = swap(engine, folders["second"])
    manifest = json.loads((folders["second"] / "manifest.json").read_text())
    assert status.digest == manifest["files"]["model.safetensors"]
    assert status.num_swaps == 1


@pytest.mark.parametrize("part", ["draft", "fill"])
def test_a_draft_that_raises_ends_no_request_and_is_off_until_another_comes(folders, monkeypatch, part):
    asked = asked_of(5, 0.0)
    engine = load(folders)
    num_calls = 0
    whole = getattr(Drafter, part)

    def fail(self, *arguments):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise RuntimeError("the third is one too many")
        whole(self, *arguments)

    monkeypatch.setattr(Drafter, part, fail)
    outputs = {}
    for request in asked:  # one by one, so that there are prompts to fill in every step
        outputs |= run(engine, [request])
    assert outputs == plain(asked)
    status = engine.stats().draft
    assert (status.state, status.is_off) == (DraftState.BROKEN, True)
    assert "one too many" in status.message
    assert num_calls == 3, "it is not asked again"
    refused = swap(engine, folders["nan"])
    assert (refused.state, refused.is_off) == (DraftState.REFUSED, True), "a refusal trusts nobody anew"
    swapped = swap(engine, folders["second"])
    assert (swapped.state, swapped.is_off) == (DraftState.SERVING, False)
    num_drafted = engine.stats().num_drafted
    run(engine, [request_of("more", asked[0].prompt_token_ids, 7)])
    assert engine.stats().num_drafted > num_drafted
