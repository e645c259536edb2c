"""The fields of a body that ask for a grammar: OpenAI's `response_format`, and vLLM's `guided_` ones.

Whether a grammar is well formed is left to its compiler, forced calls of tools to `forced_calls`.
"""

import json
from typing import Annotated, Literal

from pydantic import Field

from app.body import Body
from engine import Grammar, RequestError

Schema = Annotated[dict[str, object] | str, Field(union_mode="left_to_right")]  # as JSON, or as its text


class NamedSchemaBody(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    json_schema: dict[str, object] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormatBody(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchemaBody | None = None


class StructuredOutputsBody(Body):
    """vLLM's newer form of the `guided_` fields."""

    json_schema: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: None = None


class GuidedFields(Body):
    """At most one of these fields may ask for a grammar, for the whole answer."""

    response_format: ResponseFormatBody | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputsBody | None = None

    def grammar(self) -> Grammar | None:
        """Return the grammar asked for. Raises `RequestError` for more than one."""
        asked = [
            *_of_format(self.response_format),
            *_of_parts(
                "guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
            ),
            *_of_outputs(self.structured_outputs),
        ]
        if len(asked) > 1:
            first, second = (grammar.parameter for grammar in asked[:2])
            raise RequestError(f"{first} and {second} exclude each other: send one of them", second)
        return asked[0] if asked else None


def _of_format(body: ResponseFormatBody | None) -> list[Grammar]:
    if body is None or body.type == "text":
        return []
    if body.type == "json_object":
        return [Grammar("json", parameter="response_format")]
    if body.json_schema is None:
        raise RequestError("response_format of type json_schema needs json_schema", "response_format")
    parameter = "response_format.json_schema.schema"
    return [Grammar("json_schema", json.dumps(body.json_schema.json_schema), parameter)]


def _of_outputs(body: StructuredOutputsBody | None) -> list[Grammar]:
    if body is None:
        return []
    prefix = "structured_outputs."
    asked = _of_parts(prefix, body.json_schema, body.regex, body.choice, body.grammar)
    if body.json_object:
        asked.append(Grammar("json", parameter=f"{prefix}json_object"))
    if not asked:
        raise RequestError(
            "structured_outputs needs json, regex, choice, grammar or json_object", "structured_outputs"
        )
    return asked


def _of_parts(
    prefix: str,
    schema: dict[str, object] | str | None,
    regex: str | None,
    choice: list[str] | None,
    ebnf: str | None,
) -> list[Grammar]:
    asked = []
    if schema is not None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        asked.append(Grammar("json_schema", text, f"{prefix}json"))
    if regex is not None:
        asked.append(Grammar("regex", regex, f"{prefix}regex"))
    if choice is not None:
        asked.append(Grammar("choice", json.dumps(choice), f"{prefix}choice"))
    if ebnf is not None:
        asked.append(Grammar("ebnf", ebnf, f"{prefix}grammar"))
    return asked
