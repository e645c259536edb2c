"""`eyas trees`: search, draw and compare draft trees, and explain why a dispatcher chose one.

Searching and deciding are left to the engine; no model is loaded.
"""

import argparse
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any, TextIO

from app.config import ServerConfig
from app.dispatch_body import DISPATCHER
from engine import (
    DEFAULT_PROFILE,
    ConfigError,
    DispatchState,
    LatencyTable,
    MeasuredProfile,
    Profile,
    TreeLibrary,
    TreeTopology,
    acceptance_length,
    explain,
    search,
)

MANIFEST = "manifest.json"
_TIMEOUT_S = 10.0
TREES = "trees.json"
PLAIN = "off"
# How much of the odds of acceptance is left: the draft as measured, and drafts that fit the text worse.
ODDS = (1.0, 0.5, 0.25)


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Do what `options.what` says and write the result."""
    match options.what:
        case "search":
            out.write(_search(options))
        case "show":
            profile, library = _profile(options), _library(options)
            out.write("\n".join(draw(library.get(name), profile) for name in _names(options, library)))
        case "compare":
            out.write(_compare(options))
        case _:
            out.write(_explain(options))
    return 0


def draw(tree: TreeTopology, profile: Profile) -> str:
    """Return a drawing: of each node its rank among its siblings and the chance that it is accepted."""
    length = acceptance_length(tree, profile)
    lines = [
        f"{tree.name}: {tree.num_nodes} nodes, {tree.depth} levels, {length:.2f} tokens per call",
        "root",
    ]
    _draw_children(tree, profile, 0, 1.0, "", lines)
    return "\n".join([*lines, ""])


def _draw_children(
    tree: TreeTopology, profile: Profile, node: int, reached: float, indent: str, lines: list[str]
) -> None:
    row = profile[min(tree.depths[node], len(profile) - 1)]
    children = tree.children[node]
    for child in children:
        is_last = child == children[-1]
        rank = tree.ranks[child]
        chance = reached * (row[rank] if rank < len(row) else 0.0)
        lines.append(f"{indent}{'└' if is_last else '├'}─ {rank}  {chance:.3f}")
        _draw_children(tree, profile, child, chance, indent + ("   " if is_last else "│  "), lines)


def _explain(options: argparse.Namespace) -> str:
    """Derive the choice of a state, or those of all replicas of a server."""
    if not options.state.startswith(("http://", "https://")):
        return explain(DispatchState.from_json(_read(options.state)))
    parts = []
    for replica in _fetch(options.state.rstrip("/") + DISPATCHER, options.key):
        parts.append(
            f"replica {replica['replica']}: {replica['arm']} ({replica['reason'] or 'no step yet'})\n"
        )
        if replica["state"] is not None:
            parts.append(explain(DispatchState.from_json(json.dumps(replica["state"]))))
    return "\n".join(parts)


def _fetch(url: str, key: str | None) -> list[dict[str, Any]]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http or https, as the caller saw
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
            replicas: list[dict[str, Any]] = json.load(response)["replicas"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read {url}: {error}") from error
    return replicas


def _search(options: argparse.Namespace) -> str:
    profile = _profile(options)
    trees = [search(profile, num_nodes, options.depth) for num_nodes in options.nodes]
    if options.out is not None:
        TreeLibrary(trees).save(options.out)
    rows = [
        (tree.name, str(tree.depth), f"{acceptance_length(tree, profile):.3f}", str(list(tree.parents)))
        for tree in trees
    ]
    return _columns([("tree", "levels", "tokens per call", "parents"), *rows], left=(0, 3))


def _compare(options: argparse.Namespace) -> str:
    profile, library = _profile(options), _library(options)
    trees = [library.get(name) for name in _names(options, library)]
    leaning = [_with_odds(profile, odds) for odds in ODDS]
    header = ("tree", "nodes", "levels", *(f"odds x {odds:g}" for odds in ODDS))
    rows = [
        (
            tree.name,
            str(tree.num_nodes),
            str(tree.depth),
            *(f"{acceptance_length(tree, rows):.2f}" for rows in leaning),
        )
        for tree in trees
    ]
    text = "tokens per call\n" + _columns([header, *rows])
    if options.latency is None:
        return text
    table = LatencyTable.from_json(_read(str(options.latency)))
    return text + "\n" + _rates(trees, profile, table, options.context)


def _rates(trees: list[TreeTopology], profile: Profile, table: LatencyTable, context: int) -> str:
    """Return accepted tokens per second by tree and batch; the best of a batch is marked."""
    timed = [tree for tree in trees if tree.name in table.names]
    rates = {
        (tree.name, batch): batch
        * acceptance_length(tree, profile)
        / table.seconds(tree.name, batch, batch * context)
        for tree in timed
        for batch in table.batches
    }
    best = {batch: max(rates[tree.name, batch] for tree in timed) for batch in table.batches if timed}
    rows = [("tree", *(f"batch {batch}" for batch in table.batches))]
    for tree in timed:
        cells = [(rates[tree.name, batch], best[batch]) for batch in table.batches]
        rows.append((tree.name, *(f"{rate:.1f}{'*' if rate == most else ' '}" for rate, most in cells)))
    return f"tokens per second, {context} cached tokens a row (* best)\n" + _columns(rows)


def _with_odds(profile: Profile, factor: float) -> Profile:
    """Return the profile with the odds of any acceptance times `factor`, ranks in the same proportions."""
    return [[p * factor / (1.0 + sum(row) * (factor - 1.0)) for p in row] for row in profile]


def _columns(rows: list[tuple[str, ...]], left: tuple[int, ...] = (0,)) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, ""])


def _names(options: argparse.Namespace, library: TreeLibrary) -> list[str]:
    return options.names or [PLAIN, *(name for name in library.names if name != PLAIN)]


def _draft_folder(options: argparse.Namespace) -> Path | None:
    return ServerConfig(model=options.model, draft=options.draft).draft_folder()


def _library(options: argparse.Namespace) -> TreeLibrary:
    """Return the trees of the draft, searched ones where it ships none."""
    folder = _draft_folder(options)
    if folder is not None and (folder / TREES).is_file():
        return TreeLibrary.load(folder / TREES)
    return TreeLibrary.search(_profile(options))


def _profile(options: argparse.Namespace) -> Profile:
    """Return the acceptance asked for: a file's, else the draft's own, else that of a small head."""
    folder = _draft_folder(options)
    if options.profile is not None:
        return MeasuredProfile.load(options.profile).probabilities
    if folder is not None and (folder / MANIFEST).is_file():
        return MeasuredProfile.load(folder / MANIFEST).probabilities
    return DEFAULT_PROFILE


def _read(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {name}: {error}") from error
