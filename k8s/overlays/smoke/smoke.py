"""Asks a server for one streamed answer, and ends with 1 where it does not come whole.

The server is EYAS_URL, a key for it EYAS_API_KEY. Load and time are left to `loadtest`.
"""

import json
import os
import sys
import urllib.request

TIMEOUT_S = 120


def ask(path, body=None):
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['EYAS_API_KEY']}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(os.environ["EYAS_URL"] + path, data, headers)
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def main():
    with ask("/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {
        "model": model,
        "prompt": "One, two, three,",
        "max_tokens": 16,
        "ignore_eos": True,
        "stream": True,
    }
    with ask("/v1/completions", body | {"stream_options": {"include_usage": True}}) as answer:
        events = [line.removeprefix("data: ") for line in answer.read().decode().splitlines() if line]
    if events[-1] != "[DONE]":
        return f"the stream was cut: it ended with {events[-1]}"
    num_tokens = json.loads(events[-2])["usage"]["completion_tokens"]
    print(f"{model}: {num_tokens} tokens in {len(events) - 2} events")
    return None if num_tokens == 16 else f"expected 16 tokens, found {num_tokens}"


sys.exit(main())
