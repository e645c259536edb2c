"""Checks of size, names, documentation and module state; each returns one sentence per violation.

The tables are in `rules`; imports are left to `imports`, formatting and annotations to ruff and mypy.
"""

import ast
import re
from collections.abc import Iterator

from tests.architecture import rules
from tests.architecture.sources import Source, SourceSet, is_within

Function = ast.FunctionDef | ast.AsyncFunctionDef
MUTABLE_CALLS = frozenset(
    {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"}
)
MUTATORS = frozenset(
    {
        *("append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove"),
        *("discard", "clear", "popleft", "appendleft", "sort", "reverse"),
    }
)
MARKS = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")
STUB = "NotImplemented" + "Error"
SENTENCE_END = re.compile(r"[.!?:](?=[\s\"')`]|$)")


def check_sizes(sources: SourceSet) -> Iterator[str]:
    """Files, functions and the core stay within their limits."""
    for source in sources:
        if source.num_lines > rules.MAX_FILE_LINES:
            yield (
                f"{source.path} has {source.num_lines} lines, more than {rules.MAX_FILE_LINES}; split it up"
            )
        for node in _functions(source):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > rules.MAX_FUNCTION_LINES and _key(source, node) not in rules.LONG_FUNCTIONS:
                yield (
                    f"{source.path}:{node.lineno}: {node.name} has {num_lines} lines, more than "
                    f"{rules.MAX_FUNCTION_LINES}; split it, or give the reason in rules.LONG_FUNCTIONS"
                )
    core_lines = sum(source.num_lines for source in sources if is_within(source.module, rules.CORE))
    if core_lines > rules.MAX_CORE_LINES:
        yield f"the core has {core_lines} lines, more than {rules.MAX_CORE_LINES}; simplify it"


def long_functions(sources: SourceSet) -> set[str]:
    """Return the keys of functions over the limit, as `rules.LONG_FUNCTIONS` names them."""
    return {
        _key(source, node)
        for source in sources
        for node in _functions(source)
        if (node.end_lineno or node.lineno) - node.lineno + 1 > rules.MAX_FUNCTION_LINES
    }


def _key(source: Source, node: Function) -> str:
    return f"{source.module}:{node.name}"


def _functions(source: Source) -> Iterator[Function]:
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            yield node


def check_names(sources: SourceSet) -> Iterator[str]:
    """Files, classes and functions are named by the field's nouns and by verbs that tell their effect."""
    for source in sources:
        stem = source.module.rpartition(".")[2]
        if _words(stem) & rules.EMPTY_WORDS:
            yield f"{source.path}: the name {stem!r} says nothing; name what it is about"
        for node in ast.walk(source.tree):
            if not isinstance(node, Function | ast.ClassDef) or node.name in rules.DICTATED_NAMES:
                continue
            if _words(node.name) & rules.EMPTY_WORDS:
                yield f"{source.path}:{node.lineno}: {node.name!r} says nothing; name what it is about"
            verb, has_object, _ = node.name.lstrip("_").partition("_")
            if has_object and verb in rules.EMPTY_VERBS:
                yield f"{source.path}:{node.lineno}: the verb of {node.name!r} hides its effect; name it"


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)}


def check_docstrings(sources: SourceSet) -> Iterator[str]:
    """A module says what it is and what it leaves to others; what `engine` offers says what it promises."""
    documented = _documented_by_protocols(sources)
    for source in sources:
        if not source.text.strip():
            continue
        doc = ast.get_docstring(source.tree) or ""
        if len(SENTENCE_END.findall(doc)) < 2:
            yield f"{source.path}: the module needs two sentences: what it is, and what it leaves to others"
        if source.module.partition(".")[0] == "engine":
            yield from _undocumented(source, source.tree.body, "", documented)


def _documented_by_protocols(sources: SourceSet) -> set[str]:
    """Names of methods that a Protocol documents once for all who implement it."""
    return {
        method.name
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)
        for method in node.body
        if isinstance(method, Function) and ast.get_docstring(method)
    }


def _undocumented(source: Source, body: list[ast.stmt], owner: str, documented: set[str]) -> Iterator[str]:
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        is_plain = isinstance(node, ast.ClassDef) and _is_enum(node)
        if isinstance(node, Function):
            is_plain = _is_obvious(node) or (bool(owner) and node.name in documented)
        if not is_plain and not ast.get_docstring(node):
            name = f"{owner}{node.name}"
            yield f"{source.path}:{node.lineno}: {name} needs a docstring: what it does and promises"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(source, node.body, f"{node.name}.", documented)


def _is_enum(node: ast.ClassDef) -> bool:
    return any("Enum" in ast.unparse(base) or "Flag" in ast.unparse(base) for base in node.bases)


def _is_obvious(node: Function) -> bool:
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    is_property = "property" in decorators or ".setter" in decorators
    return is_property or "overload" in decorators or _is_one_line(node.body)


def _is_one_line(body: list[ast.stmt]) -> bool:
    plain = ast.Return | ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Raise | ast.Pass
    return len(body) == 1 and isinstance(body[0], plain)


def check_module_state(sources: SourceSet) -> Iterator[str]:
    """A module holds constants only: no lower-case container, and nobody changes an upper-case one."""
    for source in sources:
        containers = dict(_module_containers(source.tree))
        for name, line in containers.items():
            if not name.strip("_").isupper() and name != "__all__":
                yield (f"{source.path}:{line}: module state {name!r}; pass it in, or make it a CONSTANT")
        for node in ast.walk(source.tree):
            name = _mutated_name(node)
            if name in containers:
                yield (f"{source.path}:{node.lineno}: changes the module's {name}; let an object own it")


def _module_containers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        value = getattr(node, "value", None)
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not _is_container(value):
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, node.lineno


def _is_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CALLS
    displays = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    return isinstance(value, displays)


def _mutated_name(node: ast.AST) -> str | None:
    """Return the plain name that `name.append(...)`, `name[...] = ...` or `del name[...]` changes."""
    changed: ast.expr | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        changed = node.func.value
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        changed = node.value
    return changed.id if isinstance(changed, ast.Name) else None


def check_marks(sources: SourceSet) -> Iterator[str]:
    """Nothing is left for later."""
    for source in sources:
        for line_idx, line in enumerate(source.text.splitlines(), start=1):
            mark = MARKS.search(line)
            if mark:
                yield f"{source.path}:{line_idx}: {mark.group()}; finish it, or file an issue"
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Raise) and node.exc and STUB in ast.unparse(node.exc):
                yield f"{source.path}:{node.lineno}: a stub; write it, or leave the name out"
