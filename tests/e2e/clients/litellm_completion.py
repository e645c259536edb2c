"""LiteLLM with its provider for OpenAI's API."""

import json
from typing import Any

import litellm

from tests.e2e.clients.cases import MESSAGES, Answer, main, split


def ask(url: str, fields: dict[str, Any]) -> Answer:
    standard, own = split(fields)
    model, is_stream = standard.pop("model"), standard.get("stream", False)
    if is_stream:
        standard["stream_options"] = {"include_usage": True}
    answer = litellm.completion(
        model=f"openai/{model}",
        api_base=url,
        api_key="none",
        messages=MESSAGES,
        max_retries=0,
        extra_body=own,
        **standard,
    )
    chunks = list(answer) if is_stream else []
    if is_stream:
        answer = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    calls = answer.choices[0].message.tool_calls or []
    # What it builds of chunks lacks their log-probabilities.
    scored = [chunk.choices[0] for chunk in chunks if chunk.choices] or answer.choices[:1]
    return Answer(
        texts=[choice.message.content or "" for choice in answer.choices],
        ends=[choice.finish_reason for choice in answer.choices],
        num_prompt_tokens=answer.usage.prompt_tokens,
        num_tokens=answer.usage.completion_tokens,
        calls=[(call.function.name, json.loads(call.function.arguments)) for call in calls],
        call_ids=[call.id for call in calls],
        logprobs=[
            entry.model_dump()
            for choice in scored
            if (logprobs := getattr(choice, "logprobs", None)) is not None
            for entry in logprobs.content
        ],
        num_chunks=len(chunks),
    )


if __name__ == "__main__":
    main(ask)
