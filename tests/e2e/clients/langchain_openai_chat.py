"""LangChain's ChatOpenAI."""

from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI

from tests.e2e.clients.cases import MESSAGES, Answer, main, split

_OF_A_CALL = ("tools", "tool_choice", "response_format")  # the others belong to the chat's maker


def ask(url: str, fields: dict[str, Any]) -> Answer:
    standard, own = split(fields)
    is_stream = standard.pop("stream", False)
    arguments = {name: standard.pop(name) for name in _OF_A_CALL if name in standard}
    chat = ChatOpenAI(
        base_url=url,
        api_key="none",
        max_retries=0,
        stream_usage=True,
        extra_body=own,
        **standard,
    )
    messages = [HumanMessage(message["content"]) for message in MESSAGES]
    if is_stream:
        chunks = list(chat.stream(messages, **arguments))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        return _read([whole], [whole.response_metadata["finish_reason"]], whole.usage_metadata, len(chunks))
    generations = chat.generate([messages], **arguments).generations[0]
    answers = [generation.message for generation in generations]
    ends = [generation.generation_info["finish_reason"] for generation in generations]
    return _read(answers, ends, answers[0].usage_metadata)


def _read(answers: list[AIMessage], ends: list[str], usage: Any, num_chunks: int = 0) -> Answer:
    calls = answers[0].tool_calls
    scored = answers[0].response_metadata.get("logprobs")
    return Answer(
        texts=[str(answer.content) for answer in answers],
        ends=ends,
        num_prompt_tokens=usage["input_tokens"],
        num_tokens=usage["output_tokens"],
        calls=[(call["name"], call["args"]) for call in calls],
        call_ids=[call["id"] for call in calls],
        logprobs=scored["content"] if scored else [],
        num_chunks=num_chunks,
    )


if __name__ == "__main__":
    main(ask)
