"""Whether two JSON schemas can be seen to have no value in common, as the branches of a `oneOf` must.

A grammar takes any branch, so that is what makes "exactly one" true. What else of a schema a grammar can keep
is left to `json_schema`.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Places = Mapping[str, Any]
_MAX_DEPTH = 8  # of references, branches and properties that are followed
_KINDS = {"number": {"integer", "number"}}  # 1.0 is an integer too; all other types are one kind
_ALL_KINDS = {"string", "integer", "number", "boolean", "object", "array", "null"}


def find_overlap(branches: Sequence[Any], places: Places) -> tuple[int, int] | None:
    """Return the first two branches that may fit one value, None where no two do.

    places: all schemas of the document, as references name them.
    """
    pairs = itertools.combinations(enumerate(branches), 2)
    for (idx, branch), (other_idx, other) in pairs:
        if not _are_disjoint(branch, other, places, 0):
            return idx, other_idx
    return None


def _are_disjoint(left: Any, right: Any, places: Places, depth: int) -> bool:
    """Return True only where no value fits both: what is too deep or too involved counts as overlap."""
    if depth > _MAX_DEPTH:
        return False
    pairs = itertools.product(_alternatives(left, places, depth), _alternatives(right, places, depth))
    return all(_are_plainly_disjoint(*pair, places, depth) for pair in pairs)


def _alternatives(schema: Any, places: Places, depth: int) -> Iterator[dict[str, Any]]:
    """Yield schemas without references and branches of their own, of which a value of `schema` fits one."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    inner = next((schema[name] for name in ("anyOf", "oneOf", "allOf") if name in schema), None)
    if depth > _MAX_DEPTH:
        yield {}
    elif "$ref" in schema:  # one that leads nowhere may be anything
        yield from _alternatives(places.get(schema["$ref"], True), places, depth + 1)
    elif inner is None:
        yield schema
    else:
        for part in inner:
            yield from _alternatives(part, places, depth + 1)


def _are_plainly_disjoint(left: dict[str, Any], right: dict[str, Any], places: Places, depth: int) -> bool:
    values, others = _values(left), _values(right)
    if values is not None and others is not None:
        return not any(value == other for value in values for other in others)
    common = _kinds(left) & _kinds(right)
    if common != {"object"}:
        return not common
    return _lacks(left, right) or _lacks(right, left) or _differ_in_a_property(left, right, places, depth)


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values that are listed, None where others fit too."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Return the kinds of values that may fit."""
    values = _values(schema)
    if values is not None:
        return {_kind(value) for value in values}
    names = schema.get("type", _ALL_KINDS)
    return set().union(*(_KINDS.get(name, {name}) for name in ([names] if isinstance(names, str) else names)))


def _kind(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {str: "string", bool: "boolean", int: "integer", dict: "object", list: "array"}
    return names.get(type(value), "null")


def _lacks(schema: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether `schema` forbids a property that `other` requires."""
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return is_closed and not set(other.get("required", ())) <= set(schema.get("properties", ()))


def _differ_in_a_property(left: dict[str, Any], right: dict[str, Any], places: Places, depth: int) -> bool:
    """Return whether both require a property whose values tell them apart."""
    names = set(left.get("required", ())) & set(right.get("required", ()))
    return any(
        _are_disjoint(left["properties"][name], right["properties"][name], places, depth + 1)
        for name in names
    )
