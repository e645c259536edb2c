"""`eyas rollout` without a server: what it says, and its exit status.

Whole rollouts are in `tests/e2e/test_rollout.py`.
"""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from app.cli import main
from ops.registry.entry import DraftEntry, RegistryError
from ops.registry.registry import Registry
from ops.rollout.candidates import RegistryDrafts
from ops.rollout.state_store import FileStore
from tests.app.tiny_model import write_random_draft, write_random_model
from tests.ops.rollout.test_state_store import STATE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_random_model(folder)
    write_random_draft(folder / "draft")
    return folder


@pytest.fixture(params=["folder", "url"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    return Registry(f"{'file://' if request.param == 'url' else ''}{tmp_path / 'registry'}")


@pytest.fixture
def entry(registry: Registry, model: Path) -> DraftEntry:
    return registry.add(model / "draft", model, "mine", datetime.now(UTC))


def test_status_tells_the_phase_and_how_it_came_to_it(tmp_path, capsys):
    path = tmp_path / "rollout.json"
    assert main(["rollout", "status", "--state", str(path)]) == 0
    assert capsys.readouterr().out == "no rollout\n"
    FileStore(path).replace(STATE, None)
    assert main(["rollout", "status", "--state", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "watching: because"
    assert "  canary r1; 3 looks" in lines
    assert lines[-1] == "  a -> b: c"


def test_a_server_that_is_not_there_is_told_in_one_line(model, registry, entry, tmp_path, capsys):
    where = ["--dashboard", "http://127.0.0.1:9", "--server", "http://127.0.0.1:9"]
    where += ["--state", str(tmp_path / "rollout.json"), "--registry", registry.url, "--model", str(model)]
    assert main(["rollout", "start", entry.id[:8], *where]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: cannot reach http://127.0.0.1:9/metrics")
    assert error.count("\n") == 1
    assert not (tmp_path / "rollout.json").exists()
    assert main(["rollout", "promote", *where]) == 1
    assert "there is no rollout" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--margin", "1.5"], ["--window", "0"], ["--canaries", "0"], ["--time-margin", "nan"]]
)
def test_arguments_out_of_range_are_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(["rollout", "start", "abc", *arguments])
    assert error.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_candidates_come_from_the_registry(registry, entry, model, tmp_path):
    drafts = RegistryDrafts(registry, model, tmp_path / "cache", None)
    drafts.verify(entry.id)
    folder = Path(drafts.fetch(entry.id))
    assert (folder / "model.safetensors").read_bytes() == (model / "draft/model.safetensors").read_bytes()
    assert folder == Path(drafts.fetch(entry.id))
    assert drafts.digest(entry.id) == entry.facts.weights_digest
    assert registry.collect(0, datetime.now(UTC), is_real=True) == [], "a rollout tries it"
    drafts.mark_stable(entry.id)
    assert registry.collect(0, datetime.now(UTC), is_real=True) == []


def test_a_registry_for_reading_only_still_gives_its_drafts(
    registry, entry, model, tmp_path, monkeypatch, caplog
):
    def refuse(*_):
        raise RegistryError("cannot use the registry: read-only file system")

    monkeypatch.setattr(registry, "mark_tried", refuse)
    drafts = RegistryDrafts(registry, model, tmp_path / "cache", None)
    assert (Path(drafts.fetch(entry.id)) / "config.json").is_file()
    assert f"draft {entry.id} is tried: cannot use the registry: read-only" in caplog.text


def test_replicas_are_told_where_they_see_the_registry(registry, entry, model, tmp_path):
    drafts = RegistryDrafts(registry, model, tmp_path / "cache", "/models/registry")
    assert drafts.fetch(entry.id) == f"/models/registry/{entry.id}"


def test_a_candidate_that_has_changed_is_not_handed_out(registry, entry, model, tmp_path):
    path = tmp_path / "registry" / entry.id / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(RegistryError, match="is corrupt"):
        RegistryDrafts(registry, model, tmp_path / "cache", None).fetch(entry.id)
