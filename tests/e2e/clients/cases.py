"""What every client asks, and the form in which it tells what it got.

A case is a row of `CASES`, but for calls of tools, which a random model must be led to; a client is a module
with `ask`. The shapes expected are left to `test_clients`.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.app.harness import EOS_ID
from tests.e2e.server import TOOL_CALL_ID

MESSAGES = [{"role": "user", "content": "Hello"}]
NUMBER = {"type": "number"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": PARAMETERS}}
# The end of the text is the likeliest token, and forbidden for the first two: two calls, then the end.
CALLING_TWICE = {
    "temperature": 0,
    "logit_bias": {str(EOS_ID): 100, str(TOOL_CALL_ID): 50},
    "min_tokens": 2,
    "max_tokens": 8,
    "tools": [TOOL],
}
FORCED = {"temperature": 0, "tools": [TOOL], "tool_choice": "required"}
# What a random model must be led to say, and what any other one says by itself.
CALLING = {"tiny": CALLING_TWICE, "smollm2": FORCED}
PLAIN = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
DRAWN = {"temperature": 1, "max_tokens": 12, "ignore_eos": True}
SCORED = PLAIN | {"logprobs": True, "top_logprobs": 3}
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["rot", "grün"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["color", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
SHAPED = {"temperature": 1, "seed": 7, "max_tokens": 100, "response_format": FORMAT}

CASES: dict[str, dict[str, Any]] = {
    "chat": PLAIN,
    "stream": PLAIN | {"stream": True},
    "choices": DRAWN | {"n": 3, "seed": 7},
    "seed": DRAWN | {"seed": 7},
    "seed_again": DRAWN | {"seed": 7},
    "seed_other": DRAWN | {"seed": 8},
    "logprobs": SCORED,
    "logprobs_stream": SCORED | {"stream": True},
    "schema": SHAPED,
    "schema_stream": SHAPED | {"stream": True},
    "schema_logprobs": SHAPED | {"logprobs": True, "top_logprobs": 3},
}
# Fields that OpenAI does not have: its clients send them as `extra_body`.
OWN_FIELDS = frozenset({"ignore_eos", "min_tokens"})


@dataclass
class Answer:
    """An answer as its client shows it; calls are of choice 0, as (name, arguments), `logprobs` too, in
    OpenAI's form.
    """

    texts: list[str]
    ends: list[str]
    num_prompt_tokens: int
    num_tokens: int
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    num_chunks: int = 0


def cases_for(model: str) -> dict[str, dict[str, Any]]:
    """Return all cases for the model of a server."""
    calling = CALLING[model]
    cases = CASES | {"tools": calling, "tools_stream": calling | {"stream": True}}
    return {name: fields | {"model": model} for name, fields in cases.items()}


def split(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of OpenAI and our own."""
    own = {name: value for name, value in fields.items() if name in OWN_FIELDS}
    return {name: value for name, value in fields.items() if name not in own}, own


def main(ask: Callable[[str, dict[str, Any]], Answer]) -> None:
    """Ask the server at the URL in the first argument, which serves the model in the second one, for every
    case and print the answers as JSON.
    """
    url, model = sys.argv[1:]
    answers = {name: asdict(ask(f"{url}/v1", fields)) for name, fields in cases_for(model).items()}
    sys.stdout.write(json.dumps(answers))
