"""Which JSON schemas a grammar can keep.

The rest is refused with the keyword and its place, since what is silently dropped would give answers that do
not validate. Turning a schema into a grammar is left to the library.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from engine.errors import RequestError
from engine.grammar.disjoint import find_overlap

MAX_DEPTH = 32
# What a grammar cannot keep, whatever the value.
_REFUSED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "unevaluatedItems"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
# They decide alone: beside them only notes, and the type of an enumeration, are read.
_ALONE = ("$ref", "anyOf", "oneOf", "allOf")
_NOTES = (
    *("$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default"),
    *("examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
)
_RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties")
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def check_schema(text: str, parameter: str) -> None:
    """Raise `RequestError` for a text that is no JSON schema, or one that a grammar cannot keep."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{parameter} must be a JSON schema: {error}", parameter) from error
    try:
        places: dict[str, Any] = {}
        _check(schema, "#", 0, places)
        _check_one_ofs(places)
    except _Unkept as fault:
        raise RequestError(f"{parameter} cannot be kept: {fault}", parameter) from fault


class _Unkept(Exception):  # noqa: N818 (never leaves this file)
    """A part of a schema that a grammar cannot keep."""


def _check(schema: Any, place: str, depth: int, places: dict[str, Any]) -> None:
    """Check a schema and all inside it, and note where each stands."""
    places[place] = schema
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _Unkept(f"{place} must be an object or a boolean, found {type(schema).__name__}")
    if depth > MAX_DEPTH:
        raise _Unkept(f"it nests deeper than {MAX_DEPTH} levels")
    for keyword in _REFUSED:
        if keyword in schema:
            raise _Unkept(f"{place} has {keyword!r}, which a grammar cannot express")
    _check_alone(schema, place)
    _check_values(schema, place)
    for name, part in _parts(schema, place):
        _check(part, name, depth + 1, places)


def _parts(schema: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """Yield the places, as JSON pointers, and the schemas right inside a schema."""
    for keyword in _LISTS:
        for idx, part in enumerate(_of(list, schema, keyword, place)):
            yield f"{place}/{keyword}/{idx}", part
    for keyword in _MAPS:
        for name, part in _of(dict, schema, keyword, place).items():
            yield f"{place}/{keyword}/{name.replace('~', '~0').replace('/', '~1')}", part
    for keyword in _SINGLE:
        if keyword in schema:
            yield f"{place}/{keyword}", schema[keyword]


def _of(kind: type, schema: dict[str, Any], keyword: str, place: str) -> Any:
    value = schema.get(keyword, kind())
    if not isinstance(value, kind):
        raise _Unkept(f"{place}/{keyword} must be {'a list' if kind is list else 'an object'}")
    return value


def _check_alone(schema: dict[str, Any], place: str) -> None:
    for keyword in _ALONE:
        others = [name for name in schema if name not in (keyword, *_NOTES)]
        if keyword in schema and others:
            raise _Unkept(f"{place} has {others[0]!r} beside {keyword!r}: move it into the branches")
    if len(_of(list, schema, "allOf", place)) > 1:
        raise _Unkept(f"{place} has an 'allOf' of several schemas: merge them into one")
    target = schema.get("$ref", "#")
    if not (target == "#" or (isinstance(target, str) and target.startswith("#/"))):
        raise _Unkept(f"{place} has a '$ref' to another document: write it into $defs")


def _check_one_ofs(places: dict[str, Any]) -> None:
    """Check that no value fits two branches of a `oneOf`, of schemas that are well formed."""
    for place, schema in places.items():
        branches = schema.get("oneOf", ()) if isinstance(schema, dict) else ()
        if (overlap := find_overlap(branches, places)) is not None:
            first, second = overlap
            raise _Unkept(
                f"{place} has a 'oneOf' whose branches {first} and {second} may fit the same value: give "
                "them different types or different constants of a required property, or write 'anyOf'"
            )


def _check_values(schema: dict[str, Any], place: str) -> None:
    if schema.get("uniqueItems"):
        raise _Unkept(f"{place} has 'uniqueItems', which a grammar cannot express")
    if "multipleOf" in schema and (schema.get("type") != "integer" or not schema.keys().isdisjoint(_RANGES)):
        raise _Unkept(f"{place} has 'multipleOf', which only integers without a range can keep")
    if "pattern" in schema:
        _check_pattern(schema, place)
    names = _of(dict, schema, "properties", place)
    if missing := [name for name in _of(list, schema, "required", place) if name not in names]:
        raise _Unkept(f"{place} requires {missing[0]!r}, which its properties lack")
    _check_type(schema, place)


def _check_pattern(schema: dict[str, Any], place: str) -> None:
    if "minLength" in schema or "maxLength" in schema:
        raise _Unkept(f"{place} has 'pattern' beside a length: write the length into the pattern")
    pattern = schema["pattern"]
    if not isinstance(pattern, str) or "(?" in pattern.replace("(?:", ""):
        raise _Unkept(f"{place} has a 'pattern' with groups other than ( ) and (?: )")


def _check_type(schema: dict[str, Any], place: str) -> None:
    """Check that enumerated values have the type they stand beside."""
    kinds = schema.get("type", list(_TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not kinds or not set(map(str, kinds)) <= set(_TYPES):
        raise _Unkept(f"{place}/type must be one or several of {', '.join(_TYPES)}")
    allowed = {kind for name in kinds for kind in _TYPES[name]}
    values = [*_of(list, schema, "enum", place), *([schema["const"]] if "const" in schema else ())]
    if wrong := [value for value in values if type(value) not in allowed]:
        raise _Unkept(f"{place} lists {wrong[0]!r}, which is not of its type")
    if long := [value for value in values if not all(map(_is_exact, _numbers(value)))]:
        raise _Unkept(
            f"{place} lists {repr(long[0])[:80]}: a grammar holds integers of 64 bits and finite numbers only"
        )


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers within a value."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part)
    elif isinstance(value, int | float):
        yield value


def _is_exact(number: float) -> bool:
    """Return whether the grammar spells a number as itself: it reads integers beyond 64 bits as rounded
    ones.
    """
    return -(2**63) <= number < 2**63 if isinstance(number, int) else math.isfinite(number)
