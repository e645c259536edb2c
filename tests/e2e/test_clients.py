"""Clients that people use, each as a script of its own against `eyas serve`: all get the expected shapes."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

CLIENTS = ("curl", "openai_python", "langchain_openai_chat", "litellm_completion")
Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=CLIENTS)
def answers(server: Server, request: pytest.FixtureRequest) -> Answers:
    """What one client got, by case; a process of its own, so that its imports cost the others nothing."""
    command = [sys.executable, "-m", f"tests.e2e.clients.{request.param}", server.url]
    offline = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the network at import
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=offline, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # LiteLLM prints words of its own


def test_chat_is_the_same_streamed_and_whole(answers: Answers) -> None:
    whole, streamed = answers["chat"], answers["stream"]
    assert whole["texts"][0]
    assert whole["ends"] == ["length"]
    assert whole["num_tokens"] == 12
    assert whole["num_prompt_tokens"] > 5
    assert streamed["num_chunks"] > 3
    assert {**streamed, "num_chunks": 0} == whole


@pytest.mark.parametrize("case", ["tools", "tools_stream"])
def test_calls_of_tools_arrive_with_their_arguments(answers: Answers, case: str) -> None:
    answer = answers[case]
    assert answer["calls"] == [["add", {"a": 1, "b": 2}]] * 2
    assert answer["ends"] == ["tool_calls"]
    assert answer["texts"] == [""]
    assert len(set(answer["call_ids"])) == 2
    assert answer["num_tokens"] == 3


def test_choices_differ_and_the_first_is_that_of_one_choice(answers: Answers) -> None:
    choices = answers["choices"]
    assert len(set(choices["texts"])) == len(choices["ends"]) == 3
    assert choices["texts"][0] == answers["seed"]["texts"][0]
    assert choices["num_tokens"] == 36


def test_seed_gives_one_answer(answers: Answers) -> None:
    assert answers["seed"] == answers["seed_again"]
    assert answers["seed"]["texts"] != answers["seed_other"]["texts"]
