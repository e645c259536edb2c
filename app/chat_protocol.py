"""The messages and tools of a chat's body.

How they are written into a prompt is left to `chat`.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from app.body import Body
from app.call import Message, PromptShape, Tool, ToolCall
from engine import RequestError

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def _as_text(value: object) -> str:
    """Join the text parts of a message's content; `None` (an assistant turn without text) is empty."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise PydanticCustomError("content", "Input should be a string or a list of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise PydanticCustomError("content", "this model takes parts of type 'text' only")
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("content", "a part of type 'text' needs a string in 'text'")
        texts.append(part["text"])
    return "".join(texts)


class TextPart(Body):
    """A part of a content, as the document of the API shows it; `_as_text` reads it."""

    type: Literal["text"]
    text: str


Content = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | list[TextPart] | None)]


class CalledFunctionBody(Body):
    name: str
    arguments: str


class ToolCallBody(Body):
    """A call that an assistant made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunctionBody


class MessageBody(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("message", "only an assistant's message has tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("message", "a tool's message needs the tool_call_id that it answers")
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise PydanticCustomError("message", "a message needs content")
        return self

    def to_message(self) -> Message:
        # The developer role is OpenAI's newer name of the system role; templates know only the old one.
        role = "system" if self.role == "developer" else self.role
        calls = tuple(
            ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()
        )
        return Message(role, self.content, self.name, calls, self.tool_call_id)


class FunctionBody(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody

    def to_tool(self) -> Tool:
        return Tool(self.function.name, self.function.description or "", self.function.parameters or {})


class ShapeFields(Body):
    """The fields that say how a chat is written as a prompt."""

    tools: list[ToolBody] | None = Field(default=None, max_length=MAX_TOOLS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None

    def shape(self, last: MessageBody, has_tools: bool = True) -> PromptShape:
        """Return the shape of a chat that ends with `last`; without `has_tools` the model is told of none."""
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude each other",
                    "continue_final_message",
                )
            if last.role != "assistant" or not last.content or last.tool_calls:
                raise RequestError(
                    "continue_final_message needs a last message of the assistant with text in it",
                    "continue_final_message",
                )
        continues = bool(self.continue_final_message)
        adds = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        tools = tuple(tool.to_tool() for tool in self.tools or ()) if has_tools else ()
        return PromptShape(tools, adds, continues, self.chat_template_kwargs or {})


class NamedFunctionBody(Body):
    name: FunctionName


class NamedToolBody(Body):
    type: Literal["function"]
    function: NamedFunctionBody


ToolChoice = Literal["none", "auto", "required"] | NamedToolBody | None


def check_choice(choice: ToolChoice, tools: Sequence[ToolBody]) -> None:
    """Raise `RequestError` for a choice that the tools do not allow, and for a schema that is to be kept
    where nothing forces a call: only a grammar for the whole answer keeps one.
    """
    if choice in (None, "none", "auto"):
        for idx, tool in enumerate(tools):
            if tool.function.strict:
                raise RequestError(
                    "strict: true is kept only where tool_choice forces a call: leave it out",
                    f"tools[{idx}].function",
                )
    elif not tools:
        raise RequestError("tool_choice needs tools", "tool_choice")
    elif not forced_tools(choice, tools):
        raise RequestError("tool_choice names a function that is not among the tools", "tool_choice")


def forced_tools(choice: ToolChoice, tools: Sequence[ToolBody]) -> list[ToolBody]:
    """Return the tools of which an answer must call one; none where it need not call."""
    if isinstance(choice, NamedToolBody):
        return [tool for tool in tools if tool.function.name == choice.function.name][:1]
    return list(tools) if choice == "required" else []
