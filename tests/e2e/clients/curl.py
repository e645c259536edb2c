"""curl, and nothing but the bytes that it prints."""

import json
import subprocess
from collections import defaultdict
from typing import Any

from tests.e2e.clients.cases import MESSAGES, Answer, main


def ask(url: str, fields: dict[str, Any]) -> Answer:
    body = fields | {"messages": MESSAGES}
    is_stream = fields.get("stream", False)
    if is_stream:
        body["stream_options"] = {"include_usage": True}
    command = ["curl", "-sN", "--fail-with-body", f"{url}/chat/completions"]
    command += ["-H", "content-type: application/json", "-d", json.dumps(body)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return _read_stream(output) if is_stream else _read(json.loads(output))


def _read(body: dict[str, Any]) -> Answer:
    first = body["choices"][0]
    calls = first["message"].get("tool_calls", [])
    return Answer(
        texts=[choice["message"]["content"] or "" for choice in body["choices"]],
        ends=[choice["finish_reason"] for choice in body["choices"]],
        num_prompt_tokens=body["usage"]["prompt_tokens"],
        num_tokens=body["usage"]["completion_tokens"],
        calls=[(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls],
        call_ids=[call["id"] for call in calls],
        logprobs=first["logprobs"]["content"] if first["logprobs"] else [],
    )


def _read_stream(output: str) -> Answer:
    *blocks, done, rest = output.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    *chunks, usage = [json.loads(block.removeprefix("data: ")) for block in blocks]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    arguments: dict[int, str] = defaultdict(str)
    names, call_ids = {}, {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", [])):
        arguments[call["index"]] += call["function"]["arguments"]
        if "id" in call:
            names[call["index"]], call_ids[call["index"]] = call["function"]["name"], call["id"]
    return Answer(
        texts=["".join(delta.get("content", "") for delta in deltas)],
        ends=[
            chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]
        ],
        num_prompt_tokens=usage["usage"]["prompt_tokens"],
        num_tokens=usage["usage"]["completion_tokens"],
        calls=[(names[idx], json.loads(arguments[idx])) for idx in sorted(arguments)],
        call_ids=[call_ids[idx] for idx in sorted(arguments)],
        logprobs=[
            entry
            for chunk in chunks
            if (scored := chunk["choices"][0]["logprobs"]) is not None
            for entry in scored["content"]
        ],
        num_chunks=len(blocks),
    )


if __name__ == "__main__":
    main(ask)
