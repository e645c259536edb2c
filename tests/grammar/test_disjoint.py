"""Branches of a `oneOf` are told apart only where no value fits both, which `jsonschema` confirms."""

import itertools
import json

import jsonschema
import pytest

from engine.errors import RequestError
from engine.grammar.disjoint import find_overlap
from engine.grammar.json_schema import check_schema


def tagged(kind: object, **fields: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {"kind": {"const": kind}, **fields},
        "required": ["kind", *fields],
    }


CLOSED_A = {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}
CLOSED_B = {"type": "object", "properties": {"b": {}}, "required": ["b"], "additionalProperties": False}
DEFS = {"cat": tagged("cat"), "dog": tagged("dog"), "a/b": {"type": "null"}, "loop": {"$ref": "#/$defs/loop"}}
DISJOINT = [
    [{"type": "string"}, {"type": "null"}, {"type": ["integer", "boolean"]}],
    [{"type": "string"}, {"const": 3}],
    [{"type": "integer"}, {"const": 1.5}],
    [{"enum": ["a", "b"]}, {"enum": ["c", 1]}],
    [{"const": True, "type": "boolean"}, {"const": False}],
    [tagged("cat", lives={"type": "integer"}), tagged("dog"), tagged(3)],
    [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"$ref": "#/$defs/a~1b"}],
    [{"anyOf": [{"type": "null"}, {"$ref": "#/$defs/cat"}]}, {"allOf": [{"$ref": "#/$defs/dog"}]}],
    [CLOSED_A, CLOSED_B],
    [tagged("x", inner=tagged("a")), tagged("x", inner=tagged("b"))],
    [False, {}],
    [{"type": "string"}],
    [],
]
INVOLVED = object()
# Branches, the first two that may overlap, and a value that fits both unless that is only too hard to see.
OVERLAPPING = [
    ([{"type": "integer"}, {"type": "number"}], (0, 1), 3),
    ([{"type": "integer"}, {"const": 1.0}], (0, 1), 1.0),
    (
        [{"type": "null"}, {"type": "string", "maxLength": 5}, {"type": "string", "minLength": 3}],
        (1, 2),
        "abcd",
    ),
    ([{"enum": ["a", "b"]}, {"enum": ["b"]}], (0, 1), "b"),
    ([{"properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"], (0, 1), 3),
    ([tagged("cat"), {"type": "object", "properties": {"a": {"const": 1}}}], (0, 1), {"kind": "cat"}),
    ([tagged("cat"), tagged("cat", lives={"type": "integer"})], (0, 1), {"kind": "cat", "lives": 9}),
    (
        [{"$ref": "#/$defs/cat"}, {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/cat"}]}],
        (0, 1),
        {"kind": "cat"},
    ),
    ([{"$ref": "#/$defs/loop"}, {"type": "null"}], (0, 1), INVOLVED),
    ([{"$ref": "#/$defs/nowhere"}, {"type": "null"}], (0, 1), INVOLVED),
    ([{}, True], (0, 1), None),
    ([{"type": "array"}, {"type": "array", "minItems": 1}], (0, 1), [1]),
    (
        [closed | {"patternProperties": {"[ab]": {}}} for closed in (CLOSED_A, CLOSED_B)],
        (0, 1),
        {"a": 1, "b": 1},
    ),
    ([{"type": "string", "pattern": "^a$"}, {"const": "b"}], (0, 1), INVOLVED),
]
VALUES = [
    *(None, True, False, 0, 1, 1.0, 1.5, 3, "", "a", "b", "c", "abcd", [], [1], {}),
    *({"kind": kind} for kind in ("a", "b", "cat", "dog", 3)),
    *({"kind": "cat", "lives": 9}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}),
    *({"kind": "x", "inner": {"kind": kind}} for kind in ("a", "b")),
]


def fits(value: object, branch: object) -> bool:
    schema = {"allOf": [branch], "$defs": {name: schema for name, schema in DEFS.items() if name != "loop"}}
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize("branches", DISJOINT)
def test_branches_that_are_told_apart_have_no_value_in_common(branches):
    check_schema(json.dumps({"oneOf": branches, "$defs": DEFS}), "guided_json")
    for left, right in itertools.combinations(branches, 2):
        assert not [value for value in VALUES if fits(value, left) and fits(value, right)]


@pytest.mark.parametrize(("branches", "overlap", "value"), OVERLAPPING)
def test_branches_that_may_overlap_are_refused_with_their_place(branches, overlap, value):
    schema = {"type": "object", "properties": {"x": {"oneOf": branches}}, "$defs": DEFS}
    told = f"#/properties/x has a 'oneOf' whose branches {overlap[0]} and {overlap[1]} may fit"
    with pytest.raises(RequestError, match=told) as refusal:
        check_schema(json.dumps(schema), "guided_json")
    assert refusal.value.parameter == "guided_json"
    if value is not INVOLVED:
        assert fits(value, branches[overlap[0]])
        assert fits(value, branches[overlap[1]])


def test_branches_nested_beyond_what_is_followed_count_as_overlapping():
    left, right = tagged("a"), tagged("b")
    for _ in range(4):
        left, right = tagged("x", inner=left), tagged("x", inner=right)
    assert find_overlap([left, right], {}) is None
    for _ in range(6):
        left, right = tagged("x", inner=left), tagged("x", inner=right)
    assert find_overlap([left, right], {}) == (0, 1)
