"""Python files as the architecture tests see them: parsed once, with module names and imports.

What is allowed is left to `rules`, what is checked to `imports` and `shape`.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One imported name: `target` is a module or `module.name`, as written."""

    target: str
    line: int
    is_inner: bool  # inside a function or class
    is_relative: bool = False


@dataclass(frozen=True)
class Source:
    """One file: `module` is its dotted name, a package's own name for its `__init__.py`."""

    path: Path
    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        inner = {
            id(node)
            for scope in ast.walk(self.tree)
            if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            for node in ast.walk(scope)
        }
        found = []
        for node in ast.walk(self.tree):
            is_inner = id(node) in inner
            if isinstance(node, ast.Import):
                found += [Import(alias.name, node.lineno, is_inner) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                prefix = f"{node.module}." if node.module else ""
                found += [
                    Import(prefix + alias.name, node.lineno, is_inner, node.level > 0) for alias in node.names
                ]
        return tuple(found)


@dataclass(frozen=True)
class SourceSet:
    """All files under a root. `resolve` tells a module from a name inside one."""

    sources: tuple[Source, ...]

    def __iter__(self) -> Iterator[Source]:
        return iter(self.sources)

    @cached_property
    def modules(self) -> dict[str, Source]:
        return {source.module: source for source in self.sources}

    @cached_property
    def parts(self) -> frozenset[str]:
        """The top-level packages."""
        return frozenset(module.partition(".")[0] for module in self.modules)

    def resolve(self, target: str) -> str | None:
        """Return the module of ours that an import reads, or None for another library."""
        if target.partition(".")[0] not in self.parts:
            return None
        while target not in self.modules and "." in target:
            target = target.rpartition(".")[0]
        return target

    def reach(self, start: str) -> dict[str, str]:
        """Map every module of ours that `start` imports, directly or not, to the one that imports it."""
        importers = {start: ""}
        queue = [start]
        while queue:
            module = queue.pop()
            for item in self.modules[module].imports if module in self.modules else ():
                target = self.resolve(item.target)
                if target is not None and target not in importers:
                    importers[target] = module
                    queue.append(target)
        return importers


def is_within(module: str, prefixes: tuple[str, ...] | dict[str, str] | frozenset[str]) -> bool:
    """Tell whether `module` is one of `prefixes` or inside one."""
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def read_sources(root: Path, folders: tuple[str, ...]) -> SourceSet:
    """Read every Python file below `folders` of `root`."""
    sources = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            sources.append(Source(path.relative_to(root), module, path.read_text(encoding="utf-8")))
    return SourceSet(tuple(sources))
