"""`user_config`: what it may hold, that it never raises, and what becomes of each part."""

import asyncio
import hashlib
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from app.choices import Limits
from app.config import load_config
from app.draft_prefetch import drafts_folder, prefetch
from app.live import LiveControl
from app.live_config import LiveConfig
from engine import ConfigError, EngineDeadError, ModelLoadError

CONFIG = load_config(
    None, {"model": "smollm2", "max_prompt_tokens": 100, "engine.speculation.mode": "tree-8"}
)
DIGEST = "ab" * 32


@dataclass
class ToldEngine:
    """Notes what it is told."""

    loads: list[tuple[Path, str | None]] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    error: Exception | None = None

    def load_draft(self, folder: Path, digest: str | None = None) -> None:
        if self.error is not None:
            raise self.error
        self.loads.append((folder, digest))

    def switch_speculation(self, mode: str) -> None:
        if mode == "oak":
            raise ConfigError("no tree is called 'oak'")
        self.modes.append(mode)


@dataclass
class Scene:
    engine: ToldEngine = field(default_factory=ToldEngine)
    limits: list[Limits] = field(default_factory=list)
    fetched: list[str | None] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def control(self, config=CONFIG) -> LiveControl:
        limits = Limits(64, config.max_prompt_tokens, config.max_concurrent_calls)
        return LiveControl(self.engine, config, limits, self.limits.append, self.fetch)

    def fetch(self, model: str, draft: str | None, digest: str | None) -> Path:
        assert self.gate.wait(10)
        self.fetched.append(draft)
        if draft == "missing":
            raise ModelLoadError("there is none")
        return Path(f"/local/{draft}")


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.gate.set()
    return made


async def settle(control: LiveControl) -> None:
    async with asyncio.timeout(10):
        while control.status().is_fetching:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"drfat": "x"}, "drfat: unknown key"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens"),
        ({"draft": "x", "draft_digest": "short"}, "draft_digest"),
        ({"draft_digest": DIGEST}, "draft_digest"),
        ({"draft": "none"}, "speculation: off"),
        ([1], "user_config"),
        ("text", "user_config"),
    ],
)
async def test_what_is_no_configuration_is_told_and_changes_nothing(scene, values, named):
    control = scene.control()
    control.apply(values)
    status = control.status()
    assert named in dict(status.refusals)["user_config"]
    assert status.config.speculation == "tree-8"
    assert (scene.limits, scene.engine.modes, scene.engine.loads) == ([], [], [])
    control.apply({})
    assert control.status().refusals == (), "the next one counts"


async def test_nothing_differs_from_the_start(scene):
    control = scene.control()
    for values in (None, {}, {"speculation": "tree-8"}, {"draft": "auto"}):
        control.apply(values)
    await settle(control)
    assert (scene.engine.modes, scene.engine.loads) == ([], [])
    assert set(scene.limits) == {Limits(64, 100, None)}


async def test_each_key_is_brought_about_and_back_to_the_start(scene):
    control = scene.control()
    control.apply({"draft": "new", "draft_digest": DIGEST, "speculation": "off", "max_prompt_tokens": 7})
    await settle(control)
    assert scene.engine.loads == [(Path("/local/new"), DIGEST)]
    assert scene.engine.modes == ["off"]
    assert scene.limits[-1] == Limits(64, 7, None)
    control.apply({"max_concurrent_calls": 3})
    await settle(control)
    assert scene.engine.loads[1:] == [(Path("/local/auto"), None)]
    assert scene.engine.modes == ["off", "tree-8"]
    assert scene.limits[-1] == Limits(64, 100, 3)


async def test_a_change_returns_before_its_draft_is_fetched(scene):
    scene.gate.clear()
    control = scene.control()
    control.apply({"draft": "new", "max_concurrent_calls": 3})
    assert control.status().is_fetching
    assert scene.limits[-1].max_concurrent_calls == 3
    scene.gate.set()
    await settle(control)
    assert scene.engine.loads == [(Path("/local/new"), None)]


async def test_of_two_changes_at_once_the_later_draft_is_loaded(scene):
    scene.gate.clear()
    control = scene.control()
    control.apply({"draft": "first"})
    await asyncio.sleep(0.01)
    control.apply({"draft": "second"})
    scene.gate.set()
    await settle(control)
    assert [folder.name for folder, _ in scene.engine.loads] == ["second"]


@pytest.mark.parametrize(
    ("values", "key"), [({"draft": "missing"}, "draft"), ({"speculation": "oak"}, "speculation")]
)
async def test_a_part_that_cannot_be_done_is_told_and_the_rest_is_done(scene, values, key):
    control = scene.control()
    control.apply({**values, "max_concurrent_calls": 3})
    await settle(control)
    assert [name for name, _ in control.status().refusals] == [key]
    assert scene.limits[-1].max_concurrent_calls == 3
    control.apply({**values, "max_concurrent_calls": 4})
    await settle(control)
    assert [name for name, _ in control.status().refusals] == [key], "tried again"
    assert scene.fetched in ([], ["missing", "missing"])


async def test_an_engine_that_is_gone_is_told_of(scene):
    scene.engine.error = EngineDeadError("gone")
    control = scene.control()
    control.apply({"draft": "new"})
    await settle(control)
    assert control.status().refusals == (("draft", "gone"),)


def test_a_digest_belongs_to_the_draft_beside_it():
    start = LiveConfig(draft="a", draft_digest=DIGEST)
    assert LiveConfig(draft="b").over(start) == LiveConfig(draft="b")
    assert LiveConfig(speculation="off").over(start).draft_digest == DIGEST


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "manifest.json").write_text("{}")
    return folder


WEIGHTS_DIGEST = hashlib.sha256(b"weights").hexdigest()


def test_a_draft_with_a_digest_is_copied_once_and_survives_its_source(source):
    first = prefetch("m", str(source), WEIGHTS_DIGEST)
    assert first == drafts_folder() / WEIGHTS_DIGEST
    assert (first / "model.safetensors").read_bytes() == b"weights"
    (source / "model.safetensors").unlink()
    assert prefetch("m", str(source), WEIGHTS_DIGEST) == first
    assert [path.name for path in drafts_folder().iterdir()] == [WEIGHTS_DIGEST]


def test_weights_of_another_digest_leave_no_copy(source):
    with pytest.raises(ModelLoadError, match="was asked for"):
        prefetch("m", str(source), DIGEST)
    assert list(drafts_folder().iterdir()) == []


def test_a_cache_that_cannot_be_written_leaves_the_draft_where_it_lies(source, tmp_path, monkeypatch):
    """As in a pod that mounts its models for reading only."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "file" / "cache"))
    assert prefetch("m", str(source), WEIGHTS_DIGEST) == source


def test_two_that_fetch_at_once_share_one_copy(source):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(prefetch("m", str(source), WEIGHTS_DIGEST)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {drafts_folder() / WEIGHTS_DIGEST}
    assert len(found) == 6


def test_drafts_go_by_path_name_or_auto(source):
    assert prefetch("m", str(source), None) == source
    named = drafts_folder() / "mine"
    named.mkdir(parents=True)
    (named / "manifest.json").write_text("{}")
    assert prefetch("m", "mine", None) == named
    assert prefetch("other", "smollm2", None) == prefetch("smollm2", "auto", None)
    for model, draft in (("m", None), ("m", "auto"), ("m", "nowhere"), ("m", "/no/where")):
        with pytest.raises(ConfigError):
            prefetch(model, draft, None)
