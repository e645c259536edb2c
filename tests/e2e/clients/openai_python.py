"""The official client for Python."""

import json
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from tests.e2e.clients.cases import MESSAGES, Answer, main, split


def ask(url: str, fields: dict[str, Any]) -> Answer:
    client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
    standard, own = split(fields)
    arguments = standard | {"messages": MESSAGES, "extra_body": own}
    if not arguments.pop("stream", False):
        answer = client.chat.completions.create(**arguments)
        return _read(answer.choices, answer.usage)
    num_chunks = 0
    with client.chat.completions.stream(**arguments, stream_options={"include_usage": True}) as stream:
        num_chunks = sum(event.type == "chunk" for event in stream)
        answer = stream.current_completion_snapshot  # the final one may not end for its length
    return _read(answer.choices, answer.usage, num_chunks)


def _read(choices: list[Choice], usage: Any, num_chunks: int = 0) -> Answer:
    message: ChatCompletionMessage = choices[0].message
    calls = message.tool_calls or []
    scored = choices[0].logprobs
    return Answer(
        texts=[choice.message.content or "" for choice in choices],
        ends=[choice.finish_reason for choice in choices],
        num_prompt_tokens=usage.prompt_tokens,
        num_tokens=usage.completion_tokens,
        calls=[(call.function.name, json.loads(call.function.arguments)) for call in calls],
        call_ids=[call.id for call in calls],
        logprobs=[] if scored is None else [entry.model_dump() for entry in scored.content or []],
        num_chunks=num_chunks,
    )


if __name__ == "__main__":
    main(ask)
