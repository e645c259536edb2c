"""What every client asks, and the form in which it tells what it got.

A case is a row of `CASES`; a client is a module with `ask`. The shapes expected are left to `test_clients`.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.app.harness import EOS_ID
from tests.e2e.server import TOOL_CALL_ID

MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "Hello"}]
NUMBER = {"type": "number"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": SCHEMA}}
# The end of the text is the likeliest token, and forbidden for the first two: two calls, then the end.
CALLING = {
    "temperature": 0,
    "logit_bias": {str(EOS_ID): 100, str(TOOL_CALL_ID): 50},
    "min_tokens": 2,
    "max_tokens": 8,
    "tools": [TOOL],
}
PLAIN = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
DRAWN = {"temperature": 1, "max_tokens": 12, "ignore_eos": True}

CASES: dict[str, dict[str, Any]] = {
    "chat": PLAIN,
    "stream": PLAIN | {"stream": True},
    "tools": CALLING,
    "tools_stream": CALLING | {"stream": True},
    "choices": DRAWN | {"n": 3, "seed": 7},
    "seed": DRAWN | {"seed": 7},
    "seed_again": DRAWN | {"seed": 7},
    "seed_other": DRAWN | {"seed": 8},
}
# Fields that OpenAI does not have: its clients send them as `extra_body`.
OWN_FIELDS = frozenset({"ignore_eos", "min_tokens"})


@dataclass
class Answer:
    """An answer as its client shows it; calls are of choice 0, as (name, arguments)."""

    texts: list[str]
    ends: list[str]
    num_prompt_tokens: int
    num_tokens: int
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    num_chunks: int = 0


def split(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of OpenAI and our own."""
    own = {name: value for name, value in fields.items() if name in OWN_FIELDS}
    return {name: value for name, value in fields.items() if name not in own}, own


def main(ask: Callable[[str, dict[str, Any]], Answer]) -> None:
    """Ask the server at the URL in the first argument for every case and print the answers as JSON."""
    answers = {name: asdict(ask(f"{sys.argv[1]}/v1", fields)) for name, fields in CASES.items()}
    sys.stdout.write(json.dumps(answers))
