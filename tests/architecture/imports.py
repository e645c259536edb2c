"""Checks of who imports whom and where; each returns one sentence per violation.

The tables are in `rules`; names, sizes and documentation are left to `shape`.
"""

import ast
import sys
from collections.abc import Iterator

from tests.architecture import rules
from tests.architecture.sources import Import, Source, SourceSet, is_within

Place = tuple[int, int, int]  # floor, chain inside the floor, position in the chain


def _places() -> dict[str, Place]:
    return {
        f"engine.{unit}": (floor_idx, chain_idx, unit_idx)
        for floor_idx, floor in enumerate(rules.FLOORS)
        for chain_idx, chain in enumerate(floor)
        for unit_idx, unit in enumerate(chain.split(" < "))
    }


PLACES = _places()
TOP_FLOOR = len(rules.FLOORS)


def unit_of(module: str) -> str | None:
    """Return the file or package of `PLACES` that `module` belongs to, the longest name first."""
    while module and module not in PLACES:
        module = module.rpartition(".")[0]
    return module or None


def check_floors(sources: SourceSet) -> Iterator[str]:
    """Inside `engine`, an import goes to a lower floor or stays in its package."""
    for source in sources:
        if not source.module.startswith("engine."):
            continue
        unit = unit_of(source.module)
        if unit is None:
            yield f"{source.path}: {source.module} stands on no floor; give it one in rules.FLOORS"
            continue
        for item in source.imports:
            target = sources.resolve(item.target)
            if target is not None and not _may_import(unit, target):
                yield (
                    f"{source.path}:{item.line}: {source.module} (floor {PLACES[unit][0]}) imports {target} "
                    f"({_floor_name(target)}); import from lower floors or the own package, or move the code"
                )


def _floor_name(target: str) -> str:
    unit = unit_of(target)
    return f"floor {PLACES[unit][0]}" if unit else "above all floors"


def _may_import(unit: str, target: str) -> bool:
    target_unit = unit_of(target)
    if target_unit is None:
        return False
    if unit == target_unit:
        return True
    floor, chain, position = PLACES[unit]
    target_floor, target_chain, target_position = PLACES[target_unit]
    if floor == target_floor:
        return chain == target_chain and target_position < position
    return target_floor < floor


def check_parts(sources: SourceSet) -> Iterator[str]:
    """Outside `engine`, a part imports only what `rules.PART_IMPORTS` and `rules.DEEP_IMPORTS` name."""
    for source in sources:
        part = source.module.partition(".")[0]
        if part == "engine":
            continue
        deep = tuple(
            target
            for module, targets in rules.DEEP_IMPORTS.items()
            if is_within(source.module, (module,))
            for target in targets
        )
        for item in source.imports:
            target = sources.resolve(item.target)
            if target is None or is_within(target, (part, *deep)):
                continue
            allowed = rules.PART_IMPORTS.get(part, ())
            is_export = target == "engine" and "engine" in allowed
            if not is_export and not is_within(target, tuple(name for name in allowed if name != "engine")):
                yield (
                    f"{source.path}:{item.line}: {part} may not import {item.target}; it may import "
                    f"{', '.join(allowed) or 'nothing of ours'} ('engine' means `from engine import ...`)"
                )


def check_policy(sources: SourceSet) -> Iterator[str]:
    """Policy reaches neither torch nor Ray through any import, and neither a clock nor I/O directly."""
    for source in sources:
        if is_within(source.module, rules.NO_TORCH):
            yield from _heavy_imports(source, sources)
        if is_within(source.module, rules.NO_CLOCK_NO_IO):
            for item in source.imports:
                if item.target.partition(".")[0] in rules.CLOCKS_AND_IO:
                    yield (f"{source.path}:{item.line}: policy imports {item.target}; pass the value in")
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
                    yield f"{source.path}:{node.lineno}: policy opens a file; leave I/O to its caller"


def _heavy_imports(source: Source, sources: SourceSet) -> Iterator[str]:
    importers = sources.reach(source.module)
    for module in importers:
        for item in sources.modules[module].imports if module in sources.modules else ():
            if item.target.partition(".")[0] in rules.HEAVY_LIBRARIES:
                trail = [module]
                while importers[trail[-1]]:
                    trail.append(importers[trail[-1]])
                yield (
                    f"{source.path}: {' <- '.join([item.target, *trail])}: policy must not reach it; "
                    "move the plain data to a module of its own"
                )
                return


def check_import_style(sources: SourceSet) -> Iterator[str]:
    """Imports are absolute and at the top; in `engine`, libraries other than torch are optional."""
    for source in sources:
        for item in source.imports:
            place = f"{source.path}:{item.line}"
            if item.is_relative:
                yield f"{place}: relative import of {item.target}; write the absolute name"
            elif item.is_inner and not _may_be_inner(source.module, item, sources):
                yield f"{place}: {item.target} is imported inside a function; move it to the top of the file"
            elif not item.is_inner and source.module.partition(".")[0] == "engine":
                yield from _check_engine_top(source, item, place, sources)


def _may_be_inner(module: str, item: Import, sources: SourceSet) -> bool:
    if is_within(module, rules.LAZY_IMPORTERS):
        return True
    library = item.target.partition(".")[0]
    target = sources.resolve(item.target)
    if target is not None:
        return is_within(target, rules.LIBRARY_MODULES)
    return is_within(module, rules.OPTIONAL_LIBRARIES.get(library, ()))


def _check_engine_top(source: Source, item: Import, place: str, sources: SourceSet) -> Iterator[str]:
    library = item.target.partition(".")[0]
    target = sources.resolve(item.target)
    if target is not None:
        if is_within(target, rules.LIBRARY_MODULES) and not is_within(source.module, rules.LIBRARY_MODULES):
            yield f"{place}: {target} needs an optional library; import it inside the function that chose it"
    elif library not in sys.stdlib_module_names and library != "torch":
        users = rules.OPTIONAL_LIBRARIES.get(library, ())
        if not (is_within(source.module, rules.LIBRARY_MODULES) and is_within(source.module, users)):
            yield (
                f"{place}: engine imports with torch alone; import {library} inside the function that "
                f"needs it, in {', '.join(users) or 'a module named for it in rules.OPTIONAL_LIBRARIES'}"
            )
