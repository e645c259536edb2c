"""What a grammar cannot keep of a JSON schema is refused by keyword and place."""

import json
import math

import pytest

from engine.errors import RequestError
from engine.grammar.json_schema import MAX_DEPTH, check_schema

KEPT = [
    {},
    True,
    {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}, "required": ["a"]},
    {"type": ["string", "null"], "maxLength": 3},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}, "description": "x"},
    {"anyOf": [{"type": "string"}, {"$ref": "#"}], "title": "x"},
    {"allOf": [{"type": "string", "minLength": 3}]},
    {"type": "string", "pattern": "^(?:a|b)+$"},
    {"enum": ["a", 3, None, {"b": [1]}]},
    {"type": "number", "enum": [1, 2.5]},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "uniqueItems": False},
    {"type": "object", "properties": {"not": {"type": "string"}, "$ref": {"type": "string"}}},
    {"const": True, "type": "boolean"},
    {"enum": [2**63 - 1, -(2**63), 1.5e300]},
]
REFUSED = [
    ({"not": {}}, "# has 'not'"),
    ({"properties": {"a": {"if": {}}}}, "#/properties/a has 'if'"),
    ({"items": {"contains": {}}}, "#/items has 'contains'"),
    ({"anyOf": [{}, {"type": "array", "uniqueItems": True}]}, "#/anyOf/1 has 'uniqueItems'"),
    ({"const": 2**63}, "# lists 9223372036854775808: a grammar holds integers of 64 bits"),
    ({"enum": [1, {"deep": [-(2**63) - 1]}]}, "# lists .*-9223372036854775809.*: a grammar holds"),
    ({"properties": {"far": {"const": math.inf}}}, "#/properties/far lists inf: a grammar holds"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 0}, "multipleOf"),
    ({"type": "string", "pattern": "a", "minLength": 2}, "beside a length"),
    ({"type": "string", "pattern": "(?=a)b"}, "groups"),
    ({"type": "string", "pattern": 5}, "groups"),
    ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "merge"),
    ({"anyOf": [{"type": "string"}], "minLength": 2}, "'minLength' beside 'anyOf'"),
    ({"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": {}}}, "'minLength' beside '\\$ref'"),
    ({"$ref": "http://example.com/x"}, "another document"),
    ({"type": "object", "required": ["a"]}, "requires 'a'"),
    ({"type": "object", "properties": []}, "#/properties must be an object"),
    ({"anyOf": {}}, "#/anyOf must be a list"),
    ({"items": 5}, "#/items must be an object or a boolean"),
    ({"type": "strin"}, "type must be"),
    ({"type": []}, "type must be"),
    ({"type": "string", "enum": ["a", 3]}, "lists 3"),
    ({"type": "integer", "const": True}, "lists True"),
    ({"type": "integer", "enum": [True]}, "lists True"),
    ("x", "must be an object or a boolean"),
]


@pytest.mark.parametrize("schema", KEPT)
def test_a_schema_that_a_grammar_keeps_passes(schema):
    check_schema(json.dumps(schema), "guided_json")


@pytest.mark.parametrize(("schema", "reason"), REFUSED)
def test_what_a_grammar_cannot_keep_is_refused_with_its_place(schema, reason):
    with pytest.raises(RequestError, match=reason) as refusal:
        check_schema(json.dumps(schema), "guided_json")
    assert refusal.value.parameter == "guided_json"


@pytest.mark.parametrize("text", ["", "{", "nonsense", "[" * 100_000])
def test_a_text_that_is_no_json_is_refused(text):
    with pytest.raises(RequestError, match="must be a JSON schema") as refusal:
        check_schema(text, "guided_json")
    assert refusal.value.parameter == "guided_json"


def test_depth_is_bounded():
    schema: dict[str, object] = {"type": "string"}
    for _ in range(MAX_DEPTH):
        schema = {"type": "array", "items": schema}
    check_schema(json.dumps(schema), "guided_json")
    with pytest.raises(RequestError, match="deeper"):
        check_schema(json.dumps({"items": schema}), "guided_json")
