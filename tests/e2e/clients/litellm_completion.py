"""LiteLLM with its provider for OpenAI's API."""

import json
from typing import Any

import litellm

from tests.e2e.clients.cases import MESSAGES, MODEL, Answer, main, split


def ask(url: str, fields: dict[str, Any]) -> Answer:
    standard, own = split(fields)
    is_stream = standard.get("stream", False)
    if is_stream:
        standard["stream_options"] = {"include_usage": True}
    answer = litellm.completion(
        model=f"openai/{MODEL}",
        api_base=url,
        api_key="none",
        messages=MESSAGES,
        max_retries=0,
        extra_body=own,
        **standard,
    )
    num_chunks = 0
    if is_stream:
        chunks = list(answer)
        num_chunks = len(chunks)
        answer = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    calls = answer.choices[0].message.tool_calls or []
    return Answer(
        texts=[choice.message.content or "" for choice in answer.choices],
        ends=[choice.finish_reason for choice in answer.choices],
        num_prompt_tokens=answer.usage.prompt_tokens,
        num_tokens=answer.usage.completion_tokens,
        calls=[(call.function.name, json.loads(call.function.arguments)) for call in calls],
        call_ids=[call.id for call in calls],
        num_chunks=num_chunks,
    )


if __name__ == "__main__":
    main(ask)
