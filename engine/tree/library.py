"""The trees an engine may draft, by name: `off`, `chain-K` (K drafts) and `tree-N` (N nodes, root counted).

Searching a tree is left to `search`, choosing one for a step to the dispatcher.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from engine.errors import ConfigError
from engine.tree.search import Profile, search
from engine.tree.topology import MAX_NODES, TreeTopology, chain, root_only

# Rank-conditional acceptance of a small head on chat text; a draft that ships its own profile replaces it.
DEFAULT_PROFILE: Profile = (
    (0.52, 0.13, 0.07, 0.045, 0.03, 0.02, 0.015, 0.012),
    (0.53, 0.13, 0.07, 0.045, 0.03, 0.02, 0.015, 0.012),
    (0.56, 0.12, 0.065, 0.04, 0.028, 0.02, 0.015, 0.012),
)
# Nodes and most levels of each searched tree: a level costs one draft forward, so small trees stay shallow.
SEARCHED_TREES: tuple[tuple[int, int], ...] = ((8, 4), (16, 5), (32, 6), (64, 7))

_CHAIN = re.compile(r"chain-([1-9][0-9]?)")
_TREE = re.compile(r"tree-([1-9][0-9]?)")


class TreeLibrary:
    """Topologies by name, checked once. `off` always exists, and every chain of at most `max_depth` drafts.

    `max_depth` bounds every tree of the library; 0 leaves plain decoding only (an engine without a draft).
    """

    def __init__(self, trees: Iterable[TreeTopology], max_depth: int = MAX_NODES - 1) -> None:
        if not 0 <= max_depth < MAX_NODES:
            raise ConfigError(f"max_depth must be 0 to {MAX_NODES - 1}, found {max_depth}")
        self.max_depth = max_depth
        self._trees: dict[str, TreeTopology] = {}
        self._fixed = {"off": root_only()}
        for tree in trees:
            self._add(tree)

    @classmethod
    def search(cls, profile: Profile = DEFAULT_PROFILE, max_depth: int = MAX_NODES - 1) -> Self:
        """Build tree-8, tree-16, tree-32 and tree-64 for an acceptance profile, as deep as `max_depth` lets
        them be; with `max_depth` 0 there is no tree to build.
        """
        sizes = SEARCHED_TREES if max_depth else ()
        trees = [search(profile, num_nodes, min(depth, max_depth)) for num_nodes, depth in sizes]
        return cls(trees, max_depth)

    @classmethod
    def load(cls, path: Path, max_depth: int = MAX_NODES - 1) -> Self:
        """Read what `save` wrote. Raises `ConfigError` where the file or a tree in it is not valid."""
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the trees of {path}: {error}") from error
        if not isinstance(entries, dict):
            raise ConfigError(f"{path} must map tree names to parents, found {type(entries).__name__}")
        return cls(_parse(entries), max_depth)

    def save(self, path: Path) -> None:
        """Write the named trees as JSON, name -> parents; `off` and chains need no data."""
        entries = {name: list(tree.parents) for name, tree in self._trees.items()}
        path.write_text(json.dumps(entries) + "\n", encoding="utf-8")

    @property
    def names(self) -> tuple[str, ...]:
        """Every stored name, `off` first; chains come on demand."""
        return ("off", *self._trees)

    def get(self, name: str) -> TreeTopology:
        """Return the topology called `name`; `ConfigError` says which exist."""
        if name not in self._fixed and name not in self._trees:
            match = _CHAIN.fullmatch(name)
            if match is None or int(match[1]) > self.max_depth:
                chains = f" and chain-1 to chain-{self.max_depth}" if self.max_depth else ""
                raise ConfigError(f"no tree is called {name!r}: there are {', '.join(self.names)}{chains}")
            self._fixed[name] = chain(int(match[1]))
        return self._trees.get(name) or self._fixed[name]

    def _add(self, tree: TreeTopology) -> None:
        match = _TREE.fullmatch(tree.name)
        if match is None or int(match[1]) != tree.num_nodes:
            raise ConfigError(
                f"a tree of {tree.num_nodes} nodes is called tree-{tree.num_nodes}, not {tree.name!r}"
            )
        if tree.name in self._trees:
            raise ConfigError(f"two trees are called {tree.name!r}")
        if tree.depth > self.max_depth:
            raise ConfigError(
                f"{tree.name} is {tree.depth} deep, but this engine drafts {self.max_depth} levels"
            )
        self._trees[tree.name] = tree


def _parse(entries: Mapping[str, object]) -> list[TreeTopology]:
    trees = []
    for name, parents in entries.items():
        if not isinstance(parents, list) or not all(type(parent) is int for parent in parents):
            raise ConfigError(f"tree {name!r} needs a list of integer parents, found {parents!r}")
        trees.append(TreeTopology(name, tuple(parents)))
    return trees
