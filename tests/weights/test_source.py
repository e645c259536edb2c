"""The choice of a model folder by alias, hub name and path."""

import sys

import pytest

from engine.errors import ModelLoadError
from engine.weights import source
from engine.weights.source import resolve_model


def make_folder(path):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_local_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "model")
    assert resolve_model(str(folder)) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model") == folder


@pytest.mark.parametrize("name", ["nowhere", "", "config.json"])
def test_a_path_without_a_model_lists_what_would_do(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=r"hf://org/name, or one of smollm2"):
        resolve_model(name)


def test_an_alias_is_pulled_and_a_path_of_that_name_is_not(tmp_path, monkeypatch):
    pulled = make_folder(tmp_path / "cache" / "smollm2")
    local = make_folder(tmp_path / "work" / "smollm2")
    monkeypatch.chdir(local.parent)
    monkeypatch.setattr(source, "pull", lambda alias, progress, verify: pulled)
    assert resolve_model("smollm2") == pulled
    assert resolve_model("./smollm2").resolve() == local.resolve()


@pytest.mark.parametrize(
    ("name", "revision"), [("hf://org/name", None), ("hf://org/name@v1.0", "v1.0"), ("hf://org/name@", None)]
)
def test_a_hub_name_fetches_safetensors_only(tmp_path, monkeypatch, name, revision):
    hub = pytest.importorskip("huggingface_hub")
    calls = []

    def download(repository, **options):
        calls.append((repository, options["revision"]))
        assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in options["allow_patterns"])
        return str(make_folder(tmp_path / "snapshot"))

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert resolve_model(name) == tmp_path / "snapshot"
    assert calls == [("org/name", revision)]


@pytest.mark.parametrize("name", ["hf://name", "hf://", "hf://a/b/c"])
def test_a_malformed_hub_name_is_refused(name):
    pytest.importorskip("huggingface_hub")
    with pytest.raises(ModelLoadError, match="hf://org/name"):
        resolve_model(name)


@pytest.mark.parametrize("failure", [OSError("no route to host"), ValueError("bad revision")])
def test_a_failed_download_is_one_clear_error(monkeypatch, failure):
    hub = pytest.importorskip("huggingface_hub")

    def fail(repository, **options):
        raise failure

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=f"cannot download hf://org/name: {failure}"):
        resolve_model("hf://org/name")


def test_an_absent_hub_library_names_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match="pip install huggingface-hub"):
        resolve_model("hf://org/name")
