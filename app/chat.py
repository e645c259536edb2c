"""A model's chat template: messages to one prompt text.

Turning the text into tokens is left to `tokenizer`.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.call import Message
from engine import ModelLoadError, RequestError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """The Jinja template of a model folder, run in a sandbox with the globals that templates expect.

    It is read from `chat_template.jinja`, else from `tokenizer_config.json`. A folder may have none: then
    `render` raises `RequestError`. A broken file raises `ModelLoadError`.
    """

    def __init__(self, folder: Path) -> None:
        config = _read_config(folder / "tokenizer_config.json")
        self._special_tokens = {name: _token_text(config.get(name)) for name in _SPECIAL_TOKENS}
        source = _read_source(folder / "chat_template.jinja", config.get("chat_template"))
        try:
            self._template = None if source is None else _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"the chat template of {folder} is not valid Jinja: {error}") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the prompt of a chat; with `add_generation_prompt` it ends where the answer begins."""
        if self._template is None:
            raise RequestError("this model has no chat template: use /v1/completions", "messages")
        turns = [
            {"role": m.role, "content": m.content} | ({} if m.name is None else {"name": m.name})
            for m in messages
        ]
        try:
            return self._template.render(
                messages=turns, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise RequestError(
                f"the model's chat template refused the messages: {error}", "messages"
            ) from error


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    """Jinja's own filter escapes HTML, which would change what the model reads."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _read_config(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} must hold JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, found {type(config).__name__}")
    return config


def _read_source(path: Path, configured: object) -> str | None:
    """A configured template is a string, or a list of named ones of which `default` is ours."""
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if isinstance(configured, list):
        named = {item.get("name"): item.get("template") for item in configured if isinstance(item, dict)}
        configured = named.get("default")
    return configured if isinstance(configured, str) else None


def _token_text(token: object) -> str:
    """Special tokens are written as text or as an object with a `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
