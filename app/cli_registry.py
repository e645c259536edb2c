"""`eyas draft add`, `list`, `show`, `verify` and `gc`: the drafts of a registry.

Keeping them is left to `ops.registry`, checking one against its model to the engine.
"""

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from engine import cache_folder, resolve_model
from ops.registry.entry import DraftEntry
from ops.registry.registry import Registry

ID_LENGTH = 12  # of the 64 digits: enough to name a draft


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Run one of the commands."""
    registry = Registry(options.registry or str(cache_folder() / "registry"))
    if options.action == "list":
        out.write(table(registry.entries()))
    elif options.action == "gc":
        gone = registry.collect(options.keep, datetime.now(UTC), options.yes)
        done = "removed" if options.yes else "would be removed (--yes removes)"
        out.writelines(f"{draft[:ID_LENGTH]} {done}\n" for draft in gone)
    elif options.action == "add":
        name = options.name or options.source.resolve().name
        entry = registry.add(options.source, resolve_model(options.model), name, datetime.now(UTC))
        out.write(f"{entry.id}\n")
    elif options.action == "show":
        out.write(registry.get(options.draft).to_json())
    else:
        verify(registry, options.draft, options.model, out)
    return 0


def verify(registry: Registry, draft: str, model: str | None, out: TextIO) -> None:
    """Check one draft, and say what was checked."""
    entry = registry.get(draft)
    folder: Path | None = None if model is None else resolve_model(model)
    registry.verify(entry, folder)
    loaded = "" if folder is None else f", loads for {folder}"
    out.write(f"{entry.id[:ID_LENGTH]} {len(entry.files)} files as they were added{loaded}\n")


def table(entries: list[DraftEntry]) -> str:
    """Return one line per draft, the newest last."""
    lines = [f"{'id':<{ID_LENGTH}}  {'name':<24} {'head':<10} {'MB':>8}  {'base':<{ID_LENGTH}}  added"]
    for entry in entries:
        facts = entry.facts
        head = f"{facts.style} {facts.num_layers}l"
        lines.append(
            f"{entry.id[:ID_LENGTH]}  {entry.name[:24]:<24} {head:<10} {entry.num_bytes / 1e6:>8.1f}  "
            f"{facts.base_model_digest[:ID_LENGTH]}  {entry.added}"
        )
    return "\n".join([*lines, ""])
