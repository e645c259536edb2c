"""A file of prompts: one JSON object a line.

Turning messages into tokens is left to `chat` and `tokenizer`.
"""

import json
from pathlib import Path

from app.call import Message
from engine import ConfigError

FORMS = "an object with turns (a list of strings), prompt (a string) or messages"


def read_prompts(path: Path, limit: int | None = None) -> list[tuple[Message, ...]]:
    """Return a chat per line, the first `limit` of them. Of `turns` (the MT-Bench form) the first is used.

    Raises `ConfigError` naming the line where one is none of the forms, or where there is no line at all.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8: {error.reason}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{path} holds no prompt")
    return [_parse(f"{path}:{number}", line) for number, line in numbered[:limit]]


def _parse(place: str, line: str) -> tuple[Message, ...]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} must be JSON: {error}") from error
    match record:
        case {"turns": [str(first), *_]}:
            return (Message("user", first),)
        case {"prompt": str(text)}:
            return (Message("user", text),)
        case {"messages": [_, *_] as messages}:
            return tuple(_message(place, message) for message in messages)
    raise ConfigError(f"{place} must hold {FORMS}")


def _message(place: str, record: object) -> Message:
    match record:
        case {"role": str(role), "content": str(content)}:
            return Message(role, content)
    raise ConfigError(f"{place}: a message needs a role and a content, both strings")
