"""A model's chat template: messages to one prompt text.

Turning the text into tokens is left to `tokenizer`.
"""

import dataclasses
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.call import PLAIN_SHAPE, Message, PromptShape
from app.tool_formats import ToolFormat
from app.tool_prompt import format_of, signature, turns, turns_in_words
from engine import ModelLoadError, RequestError

_END_MARK = "\x00end-of-text\x00"  # stands in no message: found again in what a template made of it
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """The Jinja template of a model folder, run in a sandbox with the globals that templates expect.

    It is read from `chat_template.jinja`, else from `tokenizer_config.json`. A folder may have none: then
    `render` raises `RequestError`. A broken file raises `ModelLoadError`.
    """

    def __init__(self, folder: Path) -> None:
        config = _read_config(folder / "tokenizer_config.json")
        self._special_tokens = {name: _token_text(config.get(name)) for name in _SPECIAL_TOKENS}
        sources = _read_sources(folder / "chat_template.jinja", config.get("chat_template"))
        try:
            self._template = _compile(sources.get("default"))
            self._tool_template = _compile(sources.get("tool_use")) or self._template
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"the chat template of {folder} is not valid Jinja: {error}") from error
        tool_source = sources.get("tool_use", sources.get("default", ""))
        self._knows_tools = "tools" in _variables(tool_source)
        self.tool_format: ToolFormat = format_of(tool_source)

    def render(self, messages: Sequence[Message], shape: PromptShape = PLAIN_SHAPE) -> str:
        """Return the prompt of a chat.

        A template that knows no tools gets them, their calls and their results as words in the texts.
        """
        if shape.continues_final:
            return self._render_open(messages, shape)
        template = self._tool_template if shape.tools else self._template
        if template is None:
            raise RequestError("this model has no chat template: use /v1/completions", "messages")
        given = {"add_generation_prompt": shape.adds_generation_prompt} | self._special_tokens
        if taken := shape.arguments.keys() & {*given, "messages", "tools"}:
            raise RequestError(
                f"chat_template_kwargs may not set {', '.join(sorted(taken))}", "chat_template_kwargs"
            )
        try:
            return template.render(
                messages=turns(messages) if self._knows_tools else turns_in_words(messages, shape.tools),
                tools=[signature(tool) for tool in shape.tools] or None,
                **given,
                **shape.arguments,
            )
        except (jinja2.TemplateError, TypeError, RecursionError) as error:
            raise RequestError(
                f"the model's chat template refused the messages: {error}", "messages"
            ) from error

    def _render_open(self, messages: Sequence[Message], shape: PromptShape) -> str:
        """Return the prompt up to the end of the last message's text, behind which templates close it."""
        *before, last = messages
        marked = dataclasses.replace(last, content=last.content + _END_MARK)
        text = self.render([*before, marked], dataclasses.replace(shape, continues_final=False))
        prompt, mark, _ = text.rpartition(_END_MARK)
        if not mark:
            raise RequestError(
                "the model's chat template leaves out the last message: it cannot be continued",
                "continue_final_message",
            )
        return prompt


def _compile(source: str | None) -> jinja2.Template | None:
    return None if source is None else _environment().from_string(source)


def _variables(source: str) -> set[str]:
    """Return the names that a template is given from outside."""
    return meta.find_undeclared_variables(_environment().parse(source))


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


def _read_sources(path: Path, configured: object) -> dict[str, str]:
    """A configured template is a string, or a list of named ones: we use `default` and `tool_use`."""
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    if isinstance(configured, str):
        return {"default": configured}
    named = configured if isinstance(configured, list) else []
    pairs = [(item.get("name"), item.get("template")) for item in named if isinstance(item, dict)]
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _token_text(token: object) -> str:
    """Special tokens are written as text or as an object with a `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
