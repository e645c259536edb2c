"""The grammar of an answer that must call a tool: one JSON object with a name and its arguments.

Reading the call out of the answer is left to `tool_formats`.
"""

import json
from collections.abc import Sequence

from app.call import Tool
from engine import Grammar

_NO_ARGUMENTS: dict[str, object] = {"type": "object", "additionalProperties": False}


def call_grammar(tools: Sequence[Tool]) -> Grammar:
    """Return the grammar of one call of one of `tools`."""
    branches = [_call_schema(tool, f"/anyOf/{idx}/properties/arguments") for idx, tool in enumerate(tools)]
    return Grammar("json_schema", json.dumps({"anyOf": branches}), "tools")


def _call_schema(tool: Tool, place: str) -> dict[str, object]:
    arguments = _moved(tool.parameters, place) if tool.parameters else _NO_ARGUMENTS
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": arguments},
        "required": ["name", "arguments"],
    }


def _moved(schema: object, place: str) -> object:
    """Return a schema with its references into itself made for its new place in a larger one."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"#{place}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }
