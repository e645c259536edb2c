"""Brings a draft to the local disk before a server is asked to load it.

A copy is kept by the digest of its weights, so that a replica that starts again, or another on the same
machine, needs the source no more. Checking it against its manifest and model is left to the engine.
"""

import hashlib
import logging
import shutil
import tempfile
from pathlib import Path

from app.drafts import AUTO_DRAFT, SHIPPED_DRAFTS, draft_folder
from engine import ConfigError, ModelLoadError, cache_folder

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"


def drafts_folder() -> Path:
    """Return the folder of local copies, by digest, and of drafts that go by a name."""
    return cache_folder() / "drafts"


def prefetch(model: str, draft: str | None, digest: str | None) -> Path:
    """Return a local folder of the draft, a copy where a digest says which and the cache can be written.

    Raises `ConfigError` where there is no such draft, `ModelLoadError` where its weights are others.
    """
    if digest is not None and (drafts_folder() / digest / MANIFEST).is_file():
        return drafts_folder() / digest
    source = find_draft(model, draft)
    return source if digest is None else _copy(source, digest)


def find_draft(model: str, draft: str | None) -> Path:
    """Return the folder that a configuration means by `draft`: a path, a shipped draft, or a named one."""
    if draft is None:
        raise ConfigError("this server was started without a draft, so none can be loaded again")
    if draft != AUTO_DRAFT and "/" not in draft:
        for folder in (SHIPPED_DRAFTS / draft, drafts_folder() / draft):
            if (folder / MANIFEST).is_file():
                return folder
    found = draft_folder(model, draft)
    if found is None:
        raise ConfigError(f"no draft is shipped for {model}: name a folder")
    return found


def _copy(source: Path, digest: str) -> Path:
    """Copy a draft under its digest; whoever is second finds the first one's copy.

    A cache that is only read, such as a volume of models, takes none: the draft is read where it lies, and
    the engine holds it against the digest.
    """
    try:
        drafts_folder().mkdir(parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(dir=drafts_folder())
    except OSError as error:
        logger.warning("draft not copied source=%s reason=%r", source, str(error))
        return source
    with place as folder:
        part = Path(folder) / "draft"
        try:
            shutil.copytree(source, part)
            with (part / WEIGHTS).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ModelLoadError(f"cannot copy the draft of {source}: {error}") from error
        if found != digest:
            raise ModelLoadError(f"{source} holds weights {found}, {digest} was asked for")
        try:
            part.rename(drafts_folder() / digest)
        except OSError:
            if not (drafts_folder() / digest / MANIFEST).is_file():
                raise
    return drafts_folder() / digest
