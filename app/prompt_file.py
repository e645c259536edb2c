"""A file of chats: one JSON object a line, prompts to answer or whole conversations.

Turning messages into tokens is left to `chat`, `chat_tokens` and `tokenizer`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from app.call import Message
from engine import ConfigError

FORMS = "an object with turns (a list of strings), prompt (a string) or messages"
USER, ASSISTANT = "user", "assistant"


@dataclass(frozen=True, slots=True)
class Chat:
    """The messages of one line; of `turns` every string is a message of the user. `category` may be empty."""

    messages: tuple[Message, ...]
    category: str = ""

    @property
    def is_answered(self) -> bool:
        """True where every turn of the user has an answer: a conversation to train on as it is."""
        roles = [message.role for message in self.messages if message.role != "system"]
        return bool(roles) and roles == [USER, ASSISTANT] * (len(roles) // 2)

    @property
    def first_turn(self) -> tuple[Message, ...]:
        """The messages up to the first of the user that has no answer; all where every one has."""
        for idx, message in enumerate(self.messages):
            following = self.messages[idx + 1 : idx + 2]
            if message.role == USER and not (following and following[0].role == ASSISTANT):
                return self.messages[: idx + 1]
        return self.messages

    def without_answers(self) -> "Chat":
        """Return the chat with the user's turns alone."""
        return Chat(tuple(m for m in self.messages if m.role != ASSISTANT), self.category)


def read_chats(path: Path, limit: int | None = None) -> list[Chat]:
    """Return a chat per line, the first `limit` of them.

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


def _parse(place: str, line: str) -> Chat:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} must be JSON: {error}") from error
    category = record.get("category", "") if isinstance(record, dict) else ""
    if not isinstance(category, str):
        raise ConfigError(f"{place}: category must be a string, found {category!r}")
    match record:
        case {"turns": [_, *_] as turns} if all(isinstance(turn, str) for turn in turns):
            return Chat(tuple(Message(USER, turn) for turn in turns), category)
        case {"prompt": str(text)}:
            return Chat((Message(USER, text),), category)
        case {"messages": [_, *_] as messages}:
            return Chat(tuple(_message(place, message) for message in messages), category)
    raise ConfigError(f"{place} must hold {FORMS}")


def _message(place: str, record: object) -> Message:
    match record:
        case {"role": str(role), "content": str(content)}:
            return Message(role, content)
    raise ConfigError(f"{place}: a message needs a role and a content, both strings")
