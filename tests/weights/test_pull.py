"""Pulling: whole or not at all, once for many callers, and one clear error for what the machine refuses."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile

import pytest

from engine.errors import ModelLoadError
from engine.weights import pull as pull_module
from engine.weights.cache import cache_folder
from engine.weights.digest import file_digest, folder_digest
from engine.weights.pull import MANIFEST, PACKAGED_MODELS, PackagedModel, is_complete, pull

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")


@pytest.fixture
def packaged(tmp_path, write_gguf, tiny_llama_weights, monkeypatch):
    """Install a package that carries a tiny GGUF and fails when imported; alias it as `tiny`."""
    package = tmp_path / "site" / "tiny_gguf"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the package must not be imported')")
    path = write_gguf(package / "tiny.gguf", tiny_llama_weights())
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    model = PackagedModel("tiny-gguf", "tiny_gguf", "1.0", "tiny.gguf", sha256)
    monkeypatch.setitem(PACKAGED_MODELS, "tiny", model)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    return model


@pytest.fixture
def conversions(monkeypatch):
    """Count the conversions that run."""
    count = []
    convert = pull_module.convert_gguf

    def counted(*arguments):
        count.append(1)
        convert(*arguments)

    monkeypatch.setattr(pull_module, "convert_gguf", counted)
    return count


def visible(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_pulled_folder_is_whole_and_alone(packaged):
    folder = pull("tiny")
    assert folder == cache_folder() / "tiny"
    assert visible(folder.parent) == ["tiny"]
    assert visible(folder) == [
        "config.json",
        "generation_config.json",
        MANIFEST,
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["source_sha256"] == packaged.sha256
    assert manifest["files"].keys() == {*visible(folder)} - {MANIFEST}
    for name, file in manifest["files"].items():
        assert file == {"size": (folder / name).stat().st_size, "sha256": file_digest(folder / name)}


def test_a_second_pull_converts_nothing(packaged, conversions):
    assert pull("tiny") == pull("tiny")
    assert len(conversions) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", MANIFEST])
def test_a_damaged_folder_is_made_anew(packaged, conversions, name):
    folder = pull("tiny")
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-3])
    (folder / "stray").touch()
    pull("tiny")
    assert (folder / name).read_bytes() == whole
    assert not (folder / "stray").exists()
    assert len(conversions) == 2


def test_a_folder_of_another_source_is_not_complete(packaged):
    folder = pull("tiny")
    assert is_complete(folder, packaged)
    assert not is_complete(folder, PackagedModel("tiny-gguf", "tiny_gguf", "1.1", "tiny.gguf", "0" * 64))


def test_concurrent_pulls_convert_once(packaged, conversions):
    folders = []
    threads = [
        threading.Thread(target=lambda: folders.append(pull("tiny", progress=False))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [cache_folder() / "tiny"] * 6
    assert len(conversions) == 1


def test_a_killed_pull_leaves_no_folder_and_the_next_one_cleans_up(packaged, tmp_path):
    script = textwrap.dedent(
        f"""
        import os, signal, sys
        from engine.weights import pull as pull_module
        pull_module.PACKAGED_MODELS["tiny"] = pull_module.PackagedModel(
            "tiny-gguf", "tiny_gguf", "1.0", "tiny.gguf", {packaged.sha256!r}
        )
        sync = pull_module._sync
        def die(path):  # the last moment before the rename: every file is written
            if path.name == "model":
                os.kill(os.getpid(), signal.SIGKILL)
            sync(path)
        pull_module._sync = die
        pull_module.pull("tiny")
        """
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    (left,) = visible(cache_folder())
    assert left.startswith(".tiny.partial-")
    pull("tiny")
    assert visible(cache_folder()) == ["tiny"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ModelLoadError("bad file")])
def test_a_failed_conversion_leaves_nothing(packaged, monkeypatch, failure):
    def fail(gguf_path, folder, report):
        (folder / "config.json").write_text("{}")
        raise failure

    monkeypatch.setattr(pull_module, "convert_gguf", fail)
    with pytest.raises(type(failure)):
        pull("tiny")
    assert visible(cache_folder()) == []


@pytest.mark.parametrize(
    ("number", "complaint"),
    [(errno.ENOSPC, "is full.*EYAS_CACHE"), (errno.EROFS, "cannot write.*EYAS_CACHE")],
)
def test_a_disk_that_refuses_is_one_clear_error(packaged, monkeypatch, number, complaint):
    def refuse(gguf_path, folder, report):
        (folder / "model.safetensors").write_bytes(bytes(1000))
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pull_module, "convert_gguf", refuse)
    with pytest.raises(ModelLoadError, match=complaint):
        pull("tiny")
    assert visible(cache_folder()) == []


def test_a_cache_that_is_no_folder_is_one_clear_error(packaged, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="EYAS_CACHE"):
        pull("tiny")


def test_an_unknown_alias_lists_the_known_ones():
    with pytest.raises(ModelLoadError, match="smollm2"):
        pull("gpt-5")


@pytest.fixture
def fake_pip(packaged, tmp_path, monkeypatch):
    """Remove the installed package; a download gives a wheel with `content`, or fails."""
    site = tmp_path / "site"
    content = (site / "tiny_gguf" / "tiny.gguf").read_bytes()
    shutil.rmtree(site / "tiny_gguf")
    calls = []

    def serve(content=content, returncode=0, stderr="", member="tiny_gguf/tiny.gguf"):
        def run(command, **options):
            calls.append(command)
            if returncode == 0:
                folder = command[command.index("--dest") + 1]
                with zipfile.ZipFile(f"{folder}/tiny_gguf-1.0-py3-none-any.whl", "w") as wheel:
                    wheel.writestr(member, content)
            return subprocess.CompletedProcess(command, returncode, "", stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return calls

    return serve


def test_an_absent_package_is_downloaded_without_its_dependencies(packaged, fake_pip):
    calls = fake_pip()
    assert is_complete(pull("tiny"), packaged)
    assert visible(cache_folder()) == ["tiny"]
    assert {"--no-deps", "--only-binary=:all:", "tiny-gguf==1.0"} <= set(calls[0])


def test_an_installed_file_with_another_checksum_is_not_used(packaged, fake_pip, tmp_path):
    (tmp_path / "site" / "tiny_gguf").mkdir()
    (tmp_path / "site" / "tiny_gguf" / "tiny.gguf").write_bytes(b"another version")
    calls = fake_pip()
    assert is_complete(pull("tiny"), packaged)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("download", "complaint"),
    [
        ({"content": b"tampered"}, "must have sha256"),
        (
            {"returncode": 1, "stderr": "WARNING: x\nERROR: no network"},
            "ERROR: no network; install it by hand",
        ),
        ({"returncode": 1}, "pip ended with 1"),
        ({"member": "tiny_gguf/other.gguf"}, r"must hold tiny\.gguf"),
    ],
)
def test_a_failed_download_is_one_clear_error(fake_pip, download, complaint):
    fake_pip(**download)
    with pytest.raises(ModelLoadError, match=complaint):
        pull("tiny")
    assert visible(cache_folder()) == []


def test_a_hanging_download_is_given_up(fake_pip, monkeypatch):
    def hang(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(ModelLoadError, match="took over"):
        pull("tiny")


def test_no_bar_is_drawn_without_a_terminal(packaged, capfd):
    pull("tiny", progress=True)
    assert capfd.readouterr().err == ""


def test_the_cache_is_named_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "named"))
    assert cache_folder() == tmp_path / "named"
    monkeypatch.setenv("EYAS_CACHE", "~/named")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "named"
    monkeypatch.delenv("EYAS_CACHE")
    assert cache_folder() == tmp_path / ".cache" / "eyas"


def test_a_flipped_byte_is_told_at_load_and_repaired_by_the_next_pull(packaged):
    weights = pull("tiny") / "model.safetensors"
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged: .* run eyas pull again"):
        folder_digest(weights.parent)
    assert is_complete(pull("tiny"), packaged), "starting a server reads no weights twice"
    assert pull("tiny", verify=True) == weights.parent
    assert weights.read_bytes() == intact
    assert folder_digest(weights.parent)
