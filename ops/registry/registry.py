"""Drafts in a folder or behind an fsspec URL, each under the digest of its content.

Whether a head fits its model is left to the engine, which version serves to `rollout`.

ROOT/ID/ holds the files of a draft and `entry.json`, which is written last: a draft that has one is whole.
In a local folder, ROOT/ID is a draft folder like any other and can be served from there.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

from fsspec.core import url_to_fs

from engine import EyasError, inspect_draft
from ops.registry.entry import DIGEST_LENGTH, FILES, DraftEntry, RegistryError, parse_entry, stored_file

ENTRY = "entry.json"
STABLE, TRIED = "stable.json", "tried.json"  # ids by base model, the newest first
PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
UPLOAD_TIME = timedelta(hours=1)  # what lies without an entry for longer was given up
NUM_STABLE = 2  # the one that serves and the one before it, to go back to
NUM_TRIED = 4  # of a base model: several fleets may have a rollout each


class Registry:
    """The drafts below `url`: a folder, or a URL of any file system that fsspec knows."""

    def __init__(self, url: str) -> None:
        self.url = url
        with _translated(url):
            self._files, root = url_to_fs(str(Path(url).expanduser()) if "://" not in url else url)
        self._root = root.rstrip("/")  # no path of pathlib: those of http hold //

    def add(self, folder: Path, model: Path, name: str, now: datetime) -> DraftEntry:
        """Check the draft of `folder` against `model` and keep it. Adding it again changes nothing.

        Raises `RegistryError` for pickles and unknown files, and what `inspect_draft` raises.
        """
        paths = _draft_files(folder)
        facts = inspect_draft(folder, model)
        files = {path.name: stored_file(path) for path in paths}
        entry = DraftEntry(files, facts, name, now.isoformat(timespec="seconds"))
        with _translated(self.url):
            if self._files.exists(self._path(entry.id, ENTRY)):
                return self.get(entry.id)
            self._files.makedirs(self._path(entry.id), exist_ok=True)
            for path in paths:
                self._files.put_file(str(path), self._path(entry.id, path.name))
            self._write(self._path(entry.id, ENTRY), entry.to_json())
        return entry

    def entries(self) -> list[DraftEntry]:
        """Return all whole drafts, the oldest first."""
        return sorted((self._read(one) for one in self._whole()), key=lambda entry: (entry.added, entry.id))

    def get(self, draft: str) -> DraftEntry:
        """Return the draft whose id begins with `draft`. Raises `RegistryError` for none and for several."""
        found = [one for one in self._whole() if draft and one.startswith(draft)]
        if len(found) != 1:
            number = "no draft" if not found else f"{len(found)} drafts"
            raise RegistryError(f"{self.url} has {number} whose id begins with {draft!r}: eyas draft list")
        return self._read(found[0])

    def verify(self, entry: DraftEntry, model: Path | None = None) -> None:
        """Read every file of a draft and compare digests; with `model`, load it as a server would.

        Raises `RegistryError` or what `inspect_draft` raises, where anything is not as it was.
        """
        with tempfile.TemporaryDirectory(prefix="eyas-draft-") as work:
            folder = self.fetch(entry, Path(work))
            if model is not None and inspect_draft(folder, model) != entry.facts:
                raise RegistryError(f"draft {entry.id} was added for another model than {model}")

    def fetch(self, entry: DraftEntry, parent: Path) -> Path:
        """Return the folder `parent`/ID with the draft's files, each checked when it was copied."""
        folder = parent / entry.id
        if (folder / ENTRY).is_file() and self._is_whole(entry, folder):
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        for name, file in entry.files.items():
            with _translated(self.url):
                self._files.get_file(self._path(entry.id, name), str(folder / name))
            digest = stored_file(folder / name).sha256
            if digest != file.sha256:
                (folder / name).unlink()
                raise RegistryError(
                    f"draft {entry.id} is corrupt: {name} has sha256 {digest}, its entry says {file.sha256}"
                )
        (folder / ENTRY).write_text(entry.to_json(), encoding="utf-8")
        return folder

    def folder(self, entry: DraftEntry, cache: Path) -> Path:
        """Return a local folder of the draft, verified: the registry's own, or a copy below `cache`."""
        if "://" in self.url:
            return self.fetch(entry, cache)
        self.verify(entry)
        return Path(self._path(entry.id))

    def mark_stable(self, entry: DraftEntry) -> None:
        """Remember that `entry` serves its base model now; it and the one before it outlive `collect`."""
        self._mark(STABLE, entry, NUM_STABLE)

    def mark_tried(self, entry: DraftEntry) -> None:
        """Remember that a rollout tries `entry`; the last few that were tried outlive `collect`."""
        self._mark(TRIED, entry, NUM_TRIED)

    def collect(self, num_kept: int, now: datetime, is_real: bool) -> list[str]:
        """Remove and return the ids of drafts beyond the newest `num_kept` of a base model, but for stable
        ones and those last tried, and of uploads that were given up. Without `is_real` nothing is removed.
        """
        marked = (self._marked(STABLE), self._marked(TRIED))
        kept = {one for ids_by_base in marked for ids in ids_by_base.values() for one in ids}
        newest: dict[str, int] = {}
        for entry in reversed(self.entries()):
            base = entry.facts.base_model_digest
            newest[base] = newest.get(base, 0) + 1
            if newest[base] <= num_kept:
                kept.add(entry.id)
        with _translated(self.url):
            gone = [one for one in self._ids() if one not in kept and not self._is_arriving(one, now)]
            for one in gone if is_real else []:
                if self._files.exists(self._path(one, ENTRY)):
                    self._files.rm_file(self._path(one, ENTRY))  # first: what remains is no draft any more
                self._files.rm(self._path(one), recursive=True)
        return gone

    def _whole(self) -> list[str]:
        with _translated(self.url):
            return [one for one in self._ids() if self._files.exists(self._path(one, ENTRY))]

    def _read(self, draft: str) -> DraftEntry:
        with _translated(self.url):
            text = self._files.cat_file(self._path(draft, ENTRY)).decode("utf-8", "replace")
        return parse_entry(text, draft)

    def _mark(self, name: str, entry: DraftEntry, most: int) -> None:
        """Put `entry` first of its base model in a file of marks, which keeps `most` of each."""
        marked, base = self._marked(name), entry.facts.base_model_digest
        marked[base] = [entry.id, *(one for one in marked.get(base, []) if one != entry.id)][:most]
        with _translated(self.url):
            self._write(self._path(name), json.dumps(marked, indent=2) + "\n")

    def _marked(self, name: str) -> dict[str, list[str]]:
        with _translated(self.url):
            if not self._files.exists(self._path(name)):
                return {}
            found = json.loads(self._files.cat_file(self._path(name)))
        is_sound = isinstance(found, dict) and all(isinstance(ids, list) for ids in found.values())
        if not is_sound or not all(isinstance(one, str) for ids in found.values() for one in ids):
            raise RegistryError(
                f"{self.url}: {name} is corrupt: which drafts are in use is not known; remove it"
            )
        return dict(found)

    def _is_arriving(self, draft: str, now: datetime) -> bool:
        """Whether a draft without an entry may still be on its way; `now` has a time zone."""
        if self._files.exists(self._path(draft, ENTRY)):
            return False
        changes = [self._files.modified(path) for path in self._files.find(self._path(draft))]
        return bool(changes) and max(changes) > now - UPLOAD_TIME

    def _is_whole(self, entry: DraftEntry, folder: Path) -> bool:
        return all(
            (folder / name).is_file() and stored_file(folder / name) == file
            for name, file in entry.files.items()
        )

    def _ids(self) -> Iterator[str]:
        try:  # not `exists`: it takes a server that does not answer for an empty registry
            paths = self._files.ls(self._root, detail=False, refresh=True)
        except FileNotFoundError:
            return
        for path in paths:
            name = path.rstrip("/").rpartition("/")[2]
            if len(name) == DIGEST_LENGTH:
                yield name

    def _write(self, path: str, text: str) -> None:
        """Replace a small file whole: written beside, then moved."""
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(f"{path}.new", text.encode())
        self._files.mv(f"{path}.new", path)

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))


def _draft_files(folder: Path) -> list[Path]:
    """Return the files of a draft folder. Raises `RegistryError` for what does not belong there."""
    if not folder.is_dir():
        raise RegistryError(f"a draft is a folder, found {folder}")
    paths = sorted(path for path in folder.iterdir() if path.name != ENTRY)
    for path in paths:
        if path.suffix in PICKLES:
            raise RegistryError(f"{path} can run code when it is read: a registry takes safetensors only")
        if path.name not in FILES:
            raise RegistryError(f"{path} is no file of a draft: expected {', '.join(sorted(FILES))}")
    return paths


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """Every file system raises what its own library does, which need not be an `OSError`."""
    try:
        yield
    except EyasError:
        raise
    except Exception as error:
        raise RegistryError(
            f"cannot use the registry {url}: {' '.join((str(error) or repr(error)).split())}"
        ) from error
