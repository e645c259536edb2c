"""Drafts in a folder and behind a URL: named by content, refused when wrong, and never half there."""

import dataclasses
import json
import shutil
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.cli import main
from engine import DraftMismatchError, ModelLoadError
from ops.registry.entry import RegistryError, stored_file
from ops.registry.registry import Registry
from tests.app.tiny_model import write_random_draft, write_random_model

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_random_model(folder)
    return folder


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    write_random_draft(folder)
    return folder


@pytest.fixture(params=["folder", "memory"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    return Registry(str(tmp_path / "r") if request.param == "folder" else f"memory://{uuid.uuid4().hex}")


def change_weights(folder: Path, factor: float) -> None:
    """Write other weights with a manifest that agrees."""
    weights = load_file(folder / "model.safetensors")
    changed = {
        name: value * factor if value.is_floating_point() else value for name, value in weights.items()
    }
    save_file(changed, folder / "model.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = stored_file(folder / "model.safetensors").sha256
    (folder / "manifest.json").write_text(json.dumps(manifest))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "entry.json"}


def test_a_draft_comes_back_as_it_was_added(registry, draft, model, tmp_path):
    entry = registry.add(draft, model, "mine", NOW)
    assert registry.entries() == [entry]
    assert registry.get(entry.id[:8]) == entry
    assert files_of(registry.folder(entry, tmp_path / "cache")) == files_of(draft)
    registry.verify(entry, model)


def test_an_id_is_that_of_the_content_alone(registry, draft, model, tmp_path):
    first = registry.add(draft, model, "mine", NOW)
    copy = tmp_path / "copy"
    shutil.copytree(draft, copy)
    again = registry.add(copy, model, "another name", NOW + timedelta(days=1))
    assert again == first
    change_weights(copy, 0.5)
    assert registry.add(copy, model, "mine", NOW).id != first.id
    assert len(registry.entries()) == 2


def test_the_entry_names_base_model_and_tokenizer(registry, draft, model):
    facts = registry.add(draft, model, "mine", NOW).facts
    assert facts.tokenizer_digest == stored_file(model / "tokenizer.json").sha256
    assert facts.weights_digest == stored_file(draft / "model.safetensors").sha256
    other = registry.add(draft, model, "mine", NOW).facts
    assert other.base_model_digest == facts.base_model_digest != facts.tokenizer_digest


def corrupt_weights(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def add_pickle(folder: Path) -> None:
    torch.save({}, folder / "optimizer.pt")


def add_script(folder: Path) -> None:
    (folder / "modeling.py").write_text("1")


def rebase(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"base_model_digest": "0" * 64}
    (folder / "config.json").write_text(json.dumps(config))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["config.json"] = stored_file(folder / "config.json").sha256
    (folder / "manifest.json").write_text(json.dumps(manifest))


WRONG = [
    (corrupt_weights, ModelLoadError, "its manifest says"),
    (lambda folder: change_weights(folder, float("nan")), ModelLoadError, "not finite"),
    (lambda folder: (folder / "config.json").unlink(), ModelLoadError, "config.json"),
    (lambda folder: (folder / "manifest.json").unlink(), ModelLoadError, "manifest.json"),
    (rebase, DraftMismatchError, "trained on target weights 0000"),
    (add_pickle, RegistryError, "safetensors only"),
    (add_script, RegistryError, "no file of a draft"),
]


@pytest.mark.parametrize(("change", "error", "text"), WRONG)
def test_a_wrong_draft_is_refused_and_leaves_nothing(change, error, text, registry, draft, model):
    change(draft)
    with pytest.raises(error, match=text):
        registry.add(draft, model, "mine", NOW)
    assert registry.entries() == []


def test_a_change_in_the_registry_is_noticed(draft, model, tmp_path):
    registry = Registry(str(tmp_path / "r"))
    entry = registry.add(draft, model, "mine", NOW)
    corrupt_weights(tmp_path / "r" / entry.id)
    with pytest.raises(RegistryError, match=r"model\.safetensors has sha256"):
        registry.verify(entry)
    (tmp_path / "r" / entry.id / "entry.json").write_text(
        entry.to_json().replace(entry.facts.base_model_digest, "1" * 64)
    )
    with pytest.raises(RegistryError, match="its content is that of"):
        registry.get(entry.id)


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped", "modeling.py"])
def test_an_entry_that_names_other_files_is_refused_whoever_wrote_it(name, draft, model, tmp_path):
    """Its id is right: what is copied goes where names say, which may be out of the folder."""
    registry = Registry(str(tmp_path / "r"))
    entry = registry.add(draft, model, "mine", NOW)
    files = {**entry.files, name: entry.files["config.json"]}
    foreign = dataclasses.replace(entry, files=files)
    shutil.copytree(tmp_path / "r" / entry.id, tmp_path / "r" / foreign.id)
    (tmp_path / "r" / foreign.id / "entry.json").write_text(foreign.to_json())
    with pytest.raises(RegistryError, match="is no file of a draft"):
        registry.get(foreign.id)


@pytest.mark.parametrize("name", ["stable", "tried"])
@pytest.mark.parametrize("text", ["", "[]", "7", '{"m": "abc"}', '{"m": [1]}'])
def test_a_list_of_drafts_in_use_that_is_none_is_told_and_spares_all(text, name, draft, model, tmp_path):
    registry = Registry(str(tmp_path / "r"))
    entry = registry.add(draft, model, "mine", NOW)
    (tmp_path / "r" / f"{name}.json").write_text(text)
    with pytest.raises(RegistryError):
        registry.collect(0, NOW, is_real=True)
    with pytest.raises(RegistryError):
        {"stable": registry.mark_stable, "tried": registry.mark_tried}[name](entry)
    assert registry.entries() == [entry]


def test_a_draft_verified_for_another_model_is_refused(registry, draft, model, tmp_path):
    entry = registry.add(draft, model, "mine", NOW)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    with pytest.raises(RegistryError, match="another model"):
        registry.verify(entry, other)


def test_an_upload_that_broke_is_no_draft_and_the_next_one_heals_it(registry, draft, model):
    entry = registry.add(draft, model, "mine", NOW)
    registry._files.rm_file(registry._path(entry.id, "entry.json"))
    registry._files.rm_file(registry._path(entry.id, "model.safetensors"))
    assert registry.entries() == []
    assert registry.add(draft, model, "mine", NOW) == entry
    registry.verify(entry)


def test_collecting_spares_the_newest_the_stable_ones_and_uploads(registry, draft, model):
    entries = []
    for number in range(6):
        entries.append(registry.add(draft, model, f"draft {number}", NOW + timedelta(seconds=number)))
        change_weights(draft, 0.9)
    ids = [entry.id for entry in entries]
    for entry in entries[:3]:  # the last two marked are stable
        registry.mark_stable(entry)
    registry._files.rm_file(registry._path(ids[3], "entry.json"))  # an upload on its way
    now = datetime.now(UTC)
    assert registry.collect(1, now, is_real=False) == [
        gone for gone in registry._ids() if gone in (ids[0], ids[4])
    ]
    assert len(registry.entries()) == 5
    assert set(registry.collect(1, now, is_real=True)) == {ids[0], ids[4]}
    assert [entry.id for entry in registry.entries()] == [ids[1], ids[2], ids[5]]
    assert registry.collect(1, now + timedelta(hours=2), is_real=True) == [ids[3]]


def test_collecting_spares_the_drafts_that_rollouts_try(registry, draft, model):
    entries = []
    for number in range(6):
        entries.append(registry.add(draft, model, f"draft {number}", NOW + timedelta(seconds=number)))
        change_weights(draft, 0.9)
    for entry in entries[:5]:
        registry.mark_tried(entry)
    assert set(registry.collect(0, NOW, is_real=True)) == {entries[0].id, entries[5].id}
    assert registry.entries() == entries[1:5]


def test_no_draft_and_several_are_told(registry, draft, model):
    with pytest.raises(RegistryError, match="no draft whose id begins with 'abc'"):
        registry.get("abc")
    for _ in range(17):  # two ids share a digit then
        registry.add(draft, model, "mine", NOW)
        change_weights(draft, 0.9)
    firsts = [entry.id[0] for entry in registry.entries()]
    twice = next(digit for digit in firsts if firsts.count(digit) > 1)
    with pytest.raises(RegistryError, match=f"drafts whose id begins with '{twice}'"):
        registry.get(twice)


def test_an_unknown_kind_of_url_is_told_in_one_line():
    with pytest.raises(RegistryError, match="cannot use the registry ftpx://a"):
        Registry("ftpx://a")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        del arguments


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A web server that lists folders and sends files, and takes none."""
    (tmp_path / "r").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path / "r"))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_a_registry_of_the_web_is_read_checked_and_not_written(web, draft, model, tmp_path):
    entry = Registry(str(tmp_path / "r")).add(draft, model, "mine", NOW)
    registry = Registry(web)
    assert registry.entries() == [entry]
    registry.verify(entry, model)
    assert files_of(registry.folder(entry, tmp_path / "cache")) == files_of(draft)
    with pytest.raises(RegistryError, match="cannot use the registry http"):
        registry.mark_stable(entry)
    change_weights(draft, 0.5)
    with pytest.raises(RegistryError, match="cannot use the registry http"):
        registry.add(draft, model, "mine", NOW)
    corrupt_weights(tmp_path / "r" / entry.id)
    with pytest.raises(RegistryError, match=r"model\.safetensors has sha256"):
        registry.verify(entry)


def test_a_registry_that_does_not_answer_is_not_an_empty_one():
    with pytest.raises(RegistryError, match="cannot use the registry http"):
        Registry("http://127.0.0.1:9/drafts").entries()


def test_the_commands_keep_a_draft_and_refuse_a_corrupt_one(draft, model, tmp_path, capsys):
    where = ["--registry", str(tmp_path / "r")]
    assert main(["draft", "add", str(draft), "--model", str(model), "--name", "first", *where]) == 0
    (draft_id,) = capsys.readouterr().out.split()
    assert main(["draft", "list", *where]) == 0
    assert f"{draft_id[:12]}  first" in capsys.readouterr().out
    assert main(["draft", "show", draft_id[:6], *where]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == draft_id
    assert main(["draft", "verify", draft_id[:6], "--model", str(model), *where]) == 0
    assert capsys.readouterr().out == f"{draft_id[:12]} 3 files as they were added, loads for {model}\n"
    assert main(["draft", "gc", "--keep", "0", *where]) == 0
    assert capsys.readouterr().out == f"{draft_id[:12]} would be removed (--yes removes)\n"
    assert main(["draft", "gc", "--keep", "0", "--yes", *where]) == 0
    assert capsys.readouterr().out == f"{draft_id[:12]} removed\n"
    corrupt_weights(draft)
    assert main(["draft", "add", str(draft), "--model", str(model), *where]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "its manifest says" in error
