"""Tools in the prompt of a chat: as templates that know tools take them, and in words for those that do not.

Running templates is left to `chat`, reading the calls of an answer to `tool_formats`.
"""

import json
from collections.abc import Sequence

from app.call import Message, Tool, ToolCall
from app.tool_formats import CLOSE_TAG, OPEN_TAG, ToolFormat

Turn = dict[str, object]

_INSTRUCTIONS = """You can call functions. Their signatures are in <tools></tools>, one JSON object a line:
<tools>
{signatures}
</tools>

To call a function, answer with one JSON object inside {open_tag}{close_tag}, and with nothing else:
{open_tag}
{{"name": NAME, "arguments": OBJECT_OF_ARGUMENTS}}
{close_tag}
Call a function only where it helps, and answer in words otherwise."""


def format_of(template: str) -> ToolFormat:
    """Return the format in which the model of a chat template calls functions."""
    is_llama = "<|start_header_id|>" in template and OPEN_TAG not in template
    return "llama3" if is_llama else "hermes"


def signature(tool: Tool) -> Turn:
    """Return a tool as OpenAI's clients write it, which is what templates expect."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def turns(messages: Sequence[Message]) -> list[Turn]:
    """Return messages as templates that know tools take them."""
    return [_turn(message) for message in messages]


def turns_in_words(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Turn]:
    """Return messages with tools, calls and their results written into the texts, as Hermes models read
    them.
    """
    written = [_turn(_in_words(message)) for message in messages]
    if not tools:
        return written
    instructions = _INSTRUCTIONS.format(
        signatures="\n".join(_dump(signature(tool)) for tool in tools),
        open_tag=OPEN_TAG,
        close_tag=CLOSE_TAG,
    )
    if written[0]["role"] == "system":
        return [written[0] | {"content": f"{written[0]['content']}\n\n{instructions}"}, *written[1:]]
    return [{"role": "system", "content": instructions}, *written]


def _turn(message: Message) -> Turn:
    turn: Turn = {"role": message.role, "content": message.content}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call)},
            }
            for call in message.tool_calls
        ]
    return turn


def _in_words(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = [
        f"{OPEN_TAG}\n{_dump({'name': call.name, 'arguments': _arguments(call)})}\n{CLOSE_TAG}"
        for call in message.tool_calls
    ]
    return Message(message.role, "\n".join([message.content, *calls] if message.content else calls))


def _arguments(call: ToolCall) -> object:
    """Templates write arguments as JSON themselves; what cannot be written again stays text."""
    try:
        value: object = json.loads(call.arguments)
        _dump(value).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):
        return call.arguments
    return value


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
