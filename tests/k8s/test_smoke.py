"""The smoke test is content with a whole streamed answer only, and shows its key.

That it is with a real server's is left to `test_serve_config`.
"""

import json

import pytest

from tests.k8s.smoke import smoke
from tests.ops.rollout.http_server import Answer, Asked, served

CHUNK = 'data: {"choices": [{"text": "four"}]}'


def usage(num_tokens: int) -> str:
    return "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": num_tokens}})


def stream(*events: str):
    def answer(asked: Asked) -> Answer:
        if asked.token != "Bearer sk-one":
            return 401, {"error": {}}
        if asked.path == "/v1/models":
            return 200, {"data": [{"id": "tiny"}]}
        assert asked.body["model"] == "tiny"
        assert asked.body["stream"] is True
        return 200, "".join(f"{event}\n\n" for event in events)

    return answer


def test_a_whole_answer_is_told():
    with served(stream(CHUNK, CHUNK, usage(16), "data: [DONE]")) as url:
        ended = smoke(url, "sk-one")
    assert (ended.returncode, ended.stdout) == (0, "tiny: 16 tokens in 2 events\n")


@pytest.mark.parametrize(
    ("events", "key", "text"),
    [
        ((CHUNK, usage(16), CHUNK), "sk-one", "the stream was cut"),
        ((CHUNK, usage(3), "data: [DONE]"), "sk-one", "expected 16 tokens, found 3"),
        ((CHUNK, usage(16), "data: [DONE]"), "sk-two", "HTTP Error 401"),
    ],
)
def test_anything_else_fails(events, key, text):
    with served(stream(*events)) as url:
        ended = smoke(url, key)
    assert ended.returncode == 1
    assert text in ended.stderr
