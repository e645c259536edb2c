"""Clients that people use, each as a script of its own against `eyas serve`: all get the expected shapes.

The same scripts ask a tiny model, and by `-m slow` the default one as `make serve` starts it.
"""

import json
import math
import os
import subprocess
import sys
from typing import Any

import jsonschema
import pytest

from tests.e2e.clients.cases import PARAMETERS, SCHEMA
from tests.e2e.server import Server

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.e2e

CLIENTS = ("curl", "openai_python", "langchain_openai_chat", "litellm_completion")
SERVED = [("server", client) for client in CLIENTS]
SERVED += [pytest.param(("default_server", client), marks=pytest.mark.slow) for client in CLIENTS]
NUM_TOP = 3
NUM_CALLS = {"tiny": 2, "smollm2": 1}
TOLERANCE = 1e-4
Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=SERVED, ids=lambda served: "-".join(served))
def answers(request: pytest.FixtureRequest) -> Answers:
    """What one client got, by case; a process of its own, so that its imports cost the others nothing."""
    fixture, client = request.param
    server: Server = request.getfixturevalue(fixture)
    command = [sys.executable, "-m", f"tests.e2e.clients.{client}", server.url, server.model]
    offline = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the network at import
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=offline, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])  # LiteLLM prints words of its own
    return found | {"model": server.model, "client": client}


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
    assert answer["ends"] == ["tool_calls"]
    assert answer["texts"] == [""]
    assert len(answer["calls"]) == len(set(answer["call_ids"])) == NUM_CALLS[answers["model"]]
    for name, arguments in answer["calls"]:
        assert name == "add"
        jsonschema.validate(arguments, PARAMETERS)
    if answers["model"] == "tiny":  # which says what is in its one token
        assert answer["calls"] == [["add", {"a": 1, "b": 2}]] * 2
        assert answer["num_tokens"] == 3


def test_choices_differ_and_the_first_is_that_of_one_choice(answers: Answers) -> None:
    choices = answers["choices"]
    assert len(set(choices["texts"])) == len(choices["ends"]) == 3
    assert choices["texts"][0] == answers["seed"]["texts"][0]
    assert choices["num_tokens"] == 36


def test_seed_gives_one_answer(answers: Answers) -> None:
    assert answers["seed"] == answers["seed_again"]
    assert answers["seed"]["texts"] != answers["seed_other"]["texts"]


def test_every_token_has_its_logprob_and_asking_changes_nothing(answers: Answers) -> None:
    answer = answers["logprobs"]
    assert answer["texts"] == answers["chat"]["texts"]
    assert len(answer["logprobs"]) == answer["num_tokens"] == 12
    for entry in answer["logprobs"]:
        check_entry(entry)
        best = entry["top_logprobs"][0]
        assert (entry["token"], entry["logprob"]) == (best["token"], best["logprob"]), "it is greedy"


def test_logprobs_are_the_same_streamed_and_whole(answers: Answers) -> None:
    whole, streamed = answers["logprobs"], answers["logprobs_stream"]
    assert (streamed["texts"], streamed["num_tokens"]) == (whole["texts"], whole["num_tokens"])
    assert streamed["logprobs"]
    rest = iter(whole["logprobs"])
    for entry in streamed["logprobs"]:
        check_entry(entry)
        same = next(other for other in rest if other["bytes"] == entry["bytes"])
        assert entry["logprob"] == pytest.approx(same["logprob"], abs=TOLERANCE)
    # LiteLLM drops deltas without text, as of half a character.
    assert len(streamed["logprobs"]) == 12 or answers["client"] == "litellm_completion"


def check_entry(entry: dict[str, Any]) -> None:
    """Check the form of the score of one token."""
    values = [top["logprob"] for top in entry["top_logprobs"]]
    assert len(values) == NUM_TOP
    assert values == sorted(values, reverse=True)
    assert sum(map(math.exp, values)) <= 1 + 1e-6
    assert entry["logprob"] <= values[0] <= 0
    for scored in (entry, *entry["top_logprobs"]):
        assert bytes(scored["bytes"]).decode(errors="backslashreplace") == scored["token"]


@pytest.mark.parametrize("case", ["schema", "schema_stream", "schema_logprobs"])
def test_an_answer_of_a_schema_validates(answers: Answers, case: str) -> None:
    answer = answers[case]
    assert answer["ends"] == ["stop"]
    jsonschema.validate(json.loads(answer["texts"][0]), SCHEMA)
    assert (answer["texts"], answer["num_tokens"]) == (
        answers["schema"]["texts"],
        answers["schema"]["num_tokens"],
    )


def test_an_answer_of_a_schema_has_logprobs_too(answers: Answers) -> None:
    answer = answers["schema_logprobs"]
    assert len(answer["logprobs"]) == answer["num_tokens"]
    for entry in answer["logprobs"]:
        check_entry(entry)
    said = b"".join(bytes(entry["bytes"]) for entry in answer["logprobs"][:-1])
    assert said.decode() == answer["texts"][0], "the last token is the end"
