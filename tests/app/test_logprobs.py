"""Log-probabilities in OpenAI's forms: one entry per counted token, in step with the text, streamed or whole.

Whether the numbers are the target's is left to `tests/exactness` and to `test_logprobs_served`.
"""

import dataclasses
import itertools

import httpx
import openai
import pytest

from app.answer import Answer
from app.tokenizer import Tokenizer
from engine import FinishReason, StopStrings, WantedLogprobs
from tests.app.harness import SpokenEngine, chat_body, completion_body, events
from tests.app.test_answer import deltas_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "Hé 🦅 there"  # one token per byte, so that tokens are parts of characters
EOS = b"<|im_end|>"


@pytest.fixture
def agent(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=client)


async def post(client: httpx.AsyncClient, path: str, body: dict[str, object]) -> list[dict[str, object]]:
    """Return the bodies of an answer: one, or its events."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return events(response.text) if body.get("stream") else [response.json()]


def chat_content(bodies: list[dict[str, object]], index: int = 0) -> list[dict[str, object]]:
    choices = [choice for body in bodies for choice in body["choices"] if choice["index"] == index]
    return [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]


def completion_lists(bodies: list[dict[str, object]], index: int = 0) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for body in bodies:
        for choice in body["choices"]:
            if choice["index"] == index and choice["logprobs"] is not None:
                assert choice["logprobs"].keys() == found.keys()
                for name, values in choice["logprobs"].items():
                    found[name] += values
    assert len({len(values) for values in found.values()}) == 1
    return found


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("run_len", [1, 3, 100])
async def test_chat_tells_every_token_with_its_true_bytes(
    client: httpx.AsyncClient, engine: SpokenEngine, run_len: int, is_stream: bool
) -> None:
    engine.text, engine.run_len = TEXT, run_len
    content = chat_content(
        await post(client, CHAT, chat_body(stream=is_stream, logprobs=True, top_logprobs=2))
    )
    assert bytes(byte for token in content for byte in token["bytes"]) == TEXT.encode() + EOS
    assert [token["logprob"] for token in content] == [-(idx + 1) / 8 for idx in range(len(content))]
    assert [token["token"] for token in content[:3]] == ["H", "\\xc3", "\\xa9"]
    assert content[-1]["token"] == EOS.decode()
    for token in content:
        assert [top["token"] for top in token["top_logprobs"]] == ["!", '"']
        assert [top["bytes"] for top in token["top_logprobs"]] == [[33], [34]]
        assert [top["logprob"] for top in token["top_logprobs"]] == [token["logprob"], token["logprob"] - 1]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_text_is_the_same_whether_asked_or_not(
    client: httpx.AsyncClient, engine: SpokenEngine, is_stream: bool, path: str
) -> None:
    engine.text = TEXT
    base = chat_body if path == CHAT else completion_body
    asked = base(stream=is_stream, logprobs=True if path == CHAT else 1)
    assert text_of(await post(client, path, asked)) == text_of(
        await post(client, path, base(stream=is_stream))
    )


def text_of(bodies: list[dict[str, object]]) -> str:
    choices = [choice for body in bodies for choice in body["choices"]]
    return "".join(
        choice["text"]
        if "text" in choice
        else choice.get("delta", choice.get("message")).get("content", "") or ""
        for choice in choices
    )


async def test_nothing_is_told_or_computed_unasked(client: httpx.AsyncClient, engine: SpokenEngine) -> None:
    for path, body in ((CHAT, chat_body(logprobs=False)), (COMPLETIONS, completion_body(logprobs=False))):
        (answer,) = await post(client, path, body)
        assert answer["choices"][0]["logprobs"] is None
    assert [request.sampling.logprobs for request in engine.requests] == [None, None]


async def test_logprobs_without_top_logprobs_tell_the_token_alone(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    content = chat_content(await post(client, CHAT, chat_body(logprobs=True)))
    assert {len(token["top_logprobs"]) for token in content} == {0}
    (answer,) = await post(client, COMPLETIONS, completion_body(logprobs=0))
    assert answer["choices"][0]["logprobs"]["top_logprobs"][0] == {"H": -0.125}
    assert [request.sampling.logprobs for request in engine.requests] == [WantedLogprobs()] * 2


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("run_len", [1, 3, 100])
async def test_completion_offsets_point_into_the_text(
    client: httpx.AsyncClient, engine: SpokenEngine, run_len: int, is_stream: bool
) -> None:
    engine.text, engine.run_len = TEXT, run_len
    lists = completion_lists(await post(client, COMPLETIONS, completion_body(stream=is_stream, logprobs=2)))
    starts = [idx for idx, char in enumerate(TEXT) for _ in char.encode()]
    assert lists["text_offset"] == [*starts, len(TEXT)]
    assert lists["tokens"][:3] == ["H", "bytes:\\xc3", "bytes:\\xa9"]
    assert lists["top_logprobs"][0] == {"!": -0.125, '"': -1.125, "H": -0.125}
    assert lists["token_logprobs"] == [-(idx + 1) / 8 for idx in range(len(lists["tokens"]))]


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("run_len", [1, 4, 100])
@pytest.mark.parametrize("stop", ["o, w", "🦅", "Hello", ["zzz", "l"]])
async def test_stop_inside_a_run_cuts_logprobs_where_it_cuts_usage(
    client: httpx.AsyncClient, engine: SpokenEngine, stop: object, run_len: int, is_stream: bool
) -> None:
    engine.text, engine.run_len = "Hello, world 🦅 end", run_len
    options = {"include_usage": True} if is_stream else None
    body = chat_body(stream=is_stream, logprobs=True, stop=stop, stream_options=options)
    bodies = await post(client, CHAT, body)
    content = chat_content(bodies)
    assert len(content) == bodies[-1]["usage"]["completion_tokens"]
    ended = bytes(byte for token in content for byte in token["bytes"]).decode()
    stops = [stop] if isinstance(stop, str) else stop
    assert any(ended == engine.text[: engine.text.find(s) + len(s)] for s in stops if s in engine.text)
    assert not any(s in text_of(bodies) for s in stops)


async def test_held_back_text_does_not_hold_back_its_tokens(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    engine.run_len = 2
    bodies = await post(client, CHAT, chat_body(stream=True, logprobs=True, stop="llama"))
    first = [choice for body in bodies for choice in body["choices"] if choice["logprobs"]]
    # "ll" may begin "llama": its tokens come with a piece without text, in their step.
    assert [choice["delta"]["content"] for choice in first[:3]] == ["He", "", "llo,"]
    assert [len(choice["logprobs"]["content"]) for choice in first[:3]] == [2, 2, 2]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_every_choice_has_its_own(
    client: httpx.AsyncClient, engine: SpokenEngine, is_stream: bool
) -> None:
    engine.score = lambda request, idx: -float(request.request_id.rpartition("-")[2]) - 1
    bodies = await post(client, CHAT, chat_body(stream=is_stream, logprobs=True, n=3))
    for index in range(3):
        assert {token["logprob"] for token in chat_content(bodies, index)} == {-index - 1}


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("run_len", [3, 100])
async def test_echo_has_the_prompts_tokens_in_front(
    client: httpx.AsyncClient, engine: SpokenEngine, run_len: int, is_stream: bool
) -> None:
    engine.run_len = run_len
    body = completion_body(prompt=["é: ", [2 + 1]], echo=True, logprobs=1, n=2, stream=is_stream)
    bodies = await post(client, COMPLETIONS, body)
    for index in (0, 1):
        lists = completion_lists(bodies, index)
        assert lists["tokens"][:5] == ["bytes:\\xc3", "bytes:\\xa9", ":", " ", "H"]
        assert lists["text_offset"][:6] == [0, 0, 1, 2, 3, 4]
        assert lists["token_logprobs"][:5] == [None, -0.25, -0.375, -0.5, -0.125]
        assert lists["top_logprobs"][:2] == [None, {"!": -0.25, "bytes:\\xa9": -0.25}]
    for index in (2, 3):  # a prompt of one token: nothing predicts it
        lists = completion_lists(bodies, index)
        assert lists["tokens"][:2] == ['"', "H"]
        assert lists["token_logprobs"][:2] == [None, -0.125]
    assert {request.sampling.logprobs for request in engine.requests} == {
        WantedLogprobs(1, scores_prompt=True)
    }


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_prompt_can_be_scored_and_not_continued(
    client: httpx.AsyncClient, engine: SpokenEngine, is_stream: bool
) -> None:
    """What evaluation harnesses send for the likelihood of a text."""
    options = {"include_usage": True} if is_stream else None
    body = completion_body(prompt=["abc", "d"], echo=True, logprobs=1, max_tokens=0, stream=is_stream)
    bodies = await post(client, COMPLETIONS, body | {"stream_options": options})
    assert text_of(bodies) == "abcd"
    assert completion_lists(bodies, 0)["tokens"] == ["a", "b", "c"]
    assert completion_lists(bodies, 0)["token_logprobs"] == [None, -0.25, -0.375]
    assert completion_lists(bodies, 1)["token_logprobs"] == [None]
    usage = bodies[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 0)


async def test_minus_infinity_is_a_number_that_json_can_hold(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    engine.score = lambda request, idx: -float("inf")
    content = chat_content(await post(client, CHAT, chat_body(logprobs=True, top_logprobs=1)))
    assert {token["logprob"] for token in content} == {-9999.0}
    assert {token["top_logprobs"][0]["logprob"] for token in content} == {-9999.0}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of"),
        (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"top_logprobs": 2}, "top_logprobs"),
    ],
)
async def test_fields_that_do_not_go_together_are_refused_by_name(
    client: httpx.AsyncClient, engine: SpokenEngine, path: str, fields: dict[str, object], param: str
) -> None:
    body = (chat_body if path == CHAT else completion_body)(**fields)
    response = await client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert engine.requests == []


@pytest.mark.parametrize("is_stream", [True, False])
async def test_best_of_equal_to_n_draws_and_streams_as_usual(
    client: httpx.AsyncClient, engine: SpokenEngine, is_stream: bool
) -> None:
    bodies = await post(client, COMPLETIONS, completion_body(n=2, best_of=2, stream=is_stream))
    assert {choice["index"] for body in bodies for choice in body["choices"]} == {0, 1}
    assert [request.sampling.logprobs for request in engine.requests] == [None, None]


async def test_best_of_answers_the_likeliest_per_token_and_counts_all(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    means = [-3.0, -1.0, -2.0, -1.5, -0.5, -4.0, -2.5, -3.5]  # two prompts, four drawn for each
    engine.score = lambda request, idx: means[int(request.request_id.rpartition("-")[2])]
    body = completion_body(prompt=["a", "b"], n=2, best_of=4, logprobs=0, max_tokens=5)
    (answer,) = await post(client, COMPLETIONS, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in answer["choices"]] == [
        -1.0,
        -1.5,
        -0.5,
        -2.5,
    ]
    assert answer["usage"]["completion_tokens"] == 8 * 5
    assert answer["usage"]["prompt_tokens"] == 2


async def test_best_of_ranks_by_the_mean_not_by_the_length_and_not_by_the_echo(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    # The second is likelier per token at every place; the prompt's own scores say the opposite.
    engine.score = lambda request, idx: -2.0 if request.request_id.endswith("0") else -1.0
    body = completion_body(prompt="abcdefgh", best_of=2, echo=True)
    (answer,) = await post(client, COMPLETIONS, body)
    assert len(answer["choices"]) == 1
    assert answer["choices"][0]["text"] == "abcdefghHello, world"
    assert answer["choices"][0]["logprobs"] is None, "logprobs rank, but nobody asked to see them"
    assert [request.sampling.logprobs for request in engine.requests] == [WantedLogprobs()] * 2


async def test_official_client_reads_every_shape(agent: openai.AsyncOpenAI, engine: SpokenEngine) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chat = await agent.chat.completions.create(
        model="tiny", messages=messages, logprobs=True, top_logprobs=2, n=2
    )
    for choice in chat.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [token.token for token in choice.logprobs.content[:5]] == list("Hello")
        assert choice.logprobs.content[0].top_logprobs[1].logprob == -1.125
    stream = await agent.chat.completions.create(model="tiny", messages=messages, logprobs=True, stream=True)
    tokens = [
        token.token
        async for chunk in stream
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content or ()
    ]
    assert "".join(tokens) == engine.text + EOS.decode()
    async with agent.chat.completions.stream(
        model="tiny", messages=messages, logprobs=True, top_logprobs=1
    ) as helper:
        final = await helper.get_final_completion()
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or ()) == len(engine.text) + 1
    completion = await agent.completions.create(
        model="tiny", prompt="ab", logprobs=1, echo=True, best_of=3, max_tokens=2
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "H", "e"]
    assert logprobs.token_logprobs == [None, -0.25, -0.125, -0.25]
    assert logprobs.text_offset == [0, 1, 2, 3]


@pytest.mark.parametrize("stops", [[], ["é 🦅"]])
def test_offsets_do_not_depend_on_how_steps_were_cut(tokenizer: Tokenizer, stops: list[str]) -> None:
    token_ids = list(tokenizer.encode(TEXT, add_special_tokens=False))
    found = set()
    for size in (1, 2, 5, 100):
        answer = Answer(tokenizer, [2], StopStrings(stops))
        for delta in deltas_of(token_ids, list(range(0, len(token_ids), size)), FinishReason.LENGTH):
            answer.append(delta)
            if answer.is_over:
                break
        found.add(tuple(answer.offset_of(idx) for idx in range(answer.num_tokens)))
    assert len(found) == 1
    (offsets,) = found
    assert list(offsets) == sorted(offsets)
    assert all(b - a <= 1 for a, b in itertools.pairwise(offsets))


@pytest.mark.parametrize("is_stream", [True, False])
async def test_calls_of_functions_keep_the_logprobs_of_their_tokens(
    client: httpx.AsyncClient, engine: SpokenEngine, is_stream: bool
) -> None:
    engine.text = 'Now: <tool_call>{"name": "now", "arguments": {"zone": "é"}}</tool_call>'
    # The tool is written in words.
    engine.facts = dataclasses.replace(engine.facts, max_model_len=4096, num_blocks=1025)
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    options = {"include_usage": True} if is_stream else None
    body = chat_body(logprobs=True, tools=[tool], stream=is_stream, stream_options=options)
    bodies = await post(client, CHAT, body)
    choices = [choice for body in bodies for choice in body["choices"]]
    assert choices[-1]["finish_reason"] == "tool_calls"
    content = chat_content(bodies)
    assert bytes(byte for token in content for byte in token["bytes"]) == engine.text.encode() + EOS
    assert len(content) == bodies[-1]["usage"]["completion_tokens"]
