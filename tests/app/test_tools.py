"""Tools from request to answer: the prompt the model reads, and calls as OpenAI's clients expect them."""

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from app.call import Message, PromptShape, Tool, ToolCall
from app.chat import ChatTemplate
from app.tokenizer import Tokenizer
from app.tool_prompt import signature, turns
from tests.app.harness import SpokenEngine, chat_body, client_of, events, make_application

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Tells it", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ARGUMENTS = '{"city": "Köln"}'
CONVERSATION = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
LLAMA = (
    "{{ bos_token }}{% if tools is not none %}Tools: {% for t in tools %}{{ t | tojson(indent=2) }}\n"
    "{% endfor %}{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>"
    "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function.name }}:"
    "{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)


def prompt_of(engine: SpokenEngine) -> str:
    token_ids = engine.requests[-1].prompt_token_ids
    return engine.tokenizer.decode(token_ids, skip_special_tokens=False)


def test_template_that_knows_no_tools_gets_them_as_words(model_folder: Path) -> None:
    tools = (Tool("get_weather", "Tells it", SCHEMA),)
    text = ChatTemplate(model_folder).render([Message("user", "Hi")], PromptShape(tools))
    assert text.startswith("<|im_start|>system\n")
    assert json.dumps(signature(tools[0])) in text
    assert "<tool_call>" in text
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_system_message_keeps_its_words_before_the_tools(model_folder: Path) -> None:
    messages = [Message("system", "Be brief."), Message("user", "Hi")]
    text = ChatTemplate(model_folder).render(messages, PromptShape((Tool("now", "", {}),)))
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert text.count("<|im_start|>system") == 1


async def test_calls_and_results_of_earlier_turns_are_written_as_the_model_writes_them(
    client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    response = await client.post(CHAT, json=chat_body(messages=CONVERSATION))
    assert response.status_code == 200, response.text
    assert prompt_of(engine) == (
        "<|im_start|>user\nWeather?<|im_end|>\n"
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("tools", [(), (Tool("get_weather", "Tells it", SCHEMA), Tool("now", "", {}))])
def test_template_that_knows_tools_gets_what_transformers_gives_it(
    model_folder: Path, tmp_path: Path, tools: tuple[Tool, ...]
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": LLAMA, "bos_token": "<s>"}))
    template = ChatTemplate(tmp_path)
    assert template.tool_format == "llama3"
    messages = [
        Message("user", "Weather?"),
        Message("assistant", "", tool_calls=(ToolCall("c1", "get_weather", ARGUMENTS),)),
        Message("tool", "rain", tool_call_id="c1"),
    ]
    reference = PreTrainedTokenizerFast(tokenizer_file=str(model_folder / "tokenizer.json"), bos_token="<s>")
    expected = reference.apply_chat_template(
        turns(messages),
        tools=[signature(tool) for tool in tools] or None,
        chat_template=LLAMA,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert template.render(messages, PromptShape(tools)) == expected
    assert '"city": "Köln"' in expected


def test_template_named_for_tools_is_used_with_tools_only(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} <tool_call>"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate(tmp_path)
    assert template.render([Message("user", "Hi")]) == "plain"
    assert template.render([Message("user", "Hi")], PromptShape((Tool("now", "", {}),))) == "1 <tool_call>"
    assert template.tool_format == "hermes"


@pytest.fixture
async def tools_client(
    engine: SpokenEngine, model_folder: Path, tmp_path: Path
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server whose template knows tools and says nothing of them."""
    template = "{% if tools %}<tool_call>{% endif %}{{ messages[-1].content }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    async with client_of(make_application(engine, engine.tokenizer, ChatTemplate(tmp_path))) as client:
        yield client


@pytest.fixture
def agent(tools_client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=tools_client)


@pytest.mark.parametrize("run_len", [1, 2, 5, 400])
async def test_official_client_reads_the_same_calls_streamed_and_whole(
    agent: openai.AsyncOpenAI, engine: SpokenEngine, run_len: int
) -> None:
    engine.text = f"Let me see. {CALL}\n{CALL.replace('Köln', 'Ulm')}"
    engine.run_len = run_len
    arguments = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
    whole = (await agent.chat.completions.create(**arguments)).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "Let me see."
    calls = whole.message.tool_calls
    assert calls is not None
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", ARGUMENTS),
        ("get_weather", ARGUMENTS.replace("Köln", "Ulm")),
    ]
    assert len({call.id for call in calls}) == 2
    async with agent.chat.completions.stream(**arguments) as stream:
        async for _ in stream:
            pass
        streamed = (await stream.get_final_completion()).choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.content == whole.message.content
    assert streamed.message.tool_calls is not None
    assert [call.function.arguments for call in streamed.message.tool_calls] == [
        call.function.arguments for call in calls
    ]


async def test_deltas_of_a_call_have_its_id_once_and_its_number_always(
    agent: openai.AsyncOpenAI, engine: SpokenEngine
) -> None:
    engine.text = CALL
    engine.run_len = 4
    stream = await agent.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], tools=TOOLS, stream=True
    )
    chunks = [chunk.choices[0] async for chunk in stream]
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or ()]
    assert len(deltas) > 3, "arguments are streamed"
    assert all(delta.index == 0 for delta in deltas)
    assert deltas[0].id is not None
    assert (deltas[0].type, deltas[0].function.name) == ("function", "get_weather")
    assert all(delta.id is None and delta.function.name is None for delta in deltas[1:])
    assert "".join(delta.function.arguments for delta in deltas) == ARGUMENTS
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert not any(chunk.delta.content for chunk in chunks), "no tag leaks into the content"


async def test_answer_without_words_has_null_content(agent: openai.AsyncOpenAI, engine: SpokenEngine) -> None:
    engine.text = CALL
    answer = await agent.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], tools=TOOLS
    )
    assert answer.choices[0].message.content is None


async def test_answer_cut_inside_a_call_ends_for_its_length(
    agent: openai.AsyncOpenAI, engine: SpokenEngine
) -> None:
    engine.text = CALL
    answer = await agent.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], tools=TOOLS, max_tokens=60
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None
    assert ARGUMENTS.startswith(choice.message.tool_calls[0].function.arguments)


async def test_only_the_first_call_stands_where_one_is_asked_for(
    agent: openai.AsyncOpenAI, engine: SpokenEngine
) -> None:
    engine.text = CALL * 3
    answer = await agent.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        tools=TOOLS,
        parallel_tool_calls=False,
        n=2,
    )
    for choice in answer.choices:
        assert choice.message.tool_calls is not None
        assert len(choice.message.tool_calls) == 1


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_text_of_a_call_is_content_where_no_tool_may_be_called(
    agent: openai.AsyncOpenAI, engine: SpokenEngine, fields: dict[str, object]
) -> None:
    engine.text = CALL
    answer = await agent.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], **fields
    )
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert prompt_of(engine) == "Hi", "the template is not told of tools"


async def test_completions_take_no_tools(client: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": "x", "tools": TOOLS}
    response = await client.post("/v1/completions", json=body)
    assert response.json()["error"]["param"] == "tools"


async def test_tokens_of_a_chat_with_tools_are_counted_with_them(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    plain = (await client.post("/tokenize", json={"messages": messages})).json()["count"]
    with_tools = (await client.post("/tokenize", json={"messages": messages, "tools": TOOLS})).json()["count"]
    assert with_tools > plain + len(json.dumps(SCHEMA))


async def test_events_of_a_call_have_the_documented_shape(
    tools_client: httpx.AsyncClient, engine: SpokenEngine
) -> None:
    engine.text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    engine.run_len = 1000
    response = await tools_client.post(CHAT, json=chat_body(tools=TOOLS, stream=True))
    _, call, end = events(response.text)
    (call_id,) = [delta["id"] for delta in call["choices"][0]["delta"]["tool_calls"]]
    assert call["choices"] == [
        {
            "index": 0,
            "delta": {
                "tool_calls": [
                    {
                        "index": 0,
                        "id": call_id,
                        "type": "function",
                        "function": {"name": "now", "arguments": "{}"},
                    }
                ]
            },
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert call_id.startswith("call_")
    assert end["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}]


async def test_tags_that_are_special_tokens_are_read_too(
    engine: SpokenEngine, model_folder: Path, tmp_path: Path
) -> None:
    raw = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    raw.add_special_tokens(["<tool_call>", "</tool_call>"])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ tools }}"}))
    engine.tokenizer = Tokenizer(tmp_path)
    engine.text = CALL
    engine.facts = dataclasses.replace(engine.facts, vocab_size=260)
    async with client_of(make_application(engine, engine.tokenizer, ChatTemplate(tmp_path))) as client:
        answer = (await client.post(CHAT, json=chat_body(tools=TOOLS))).json()
        plain = (await client.post(CHAT, json=chat_body())).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert "tool_call" not in plain["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "arguments",
    ["", "{", "[" * 90_000, "[" * 990 + "]" * 990, '"\\ud800"', '{"a": "\\udfff"}', "5", '"text"', "NaN"],
)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_arguments_of_an_earlier_call_may_be_any_text(
    tools_client: httpx.AsyncClient, client: httpx.AsyncClient, arguments: str, is_stream: bool
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "Hi"}]
    for each in (client, tools_client):
        response = await each.post(CHAT, json=chat_body(messages=messages, stream=is_stream))
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("written", ['"\\ud800"', '{"a": "\\ud800"}', '"\\x"', '"\\u12"'])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_model_may_write_any_arguments(
    tools_client: httpx.AsyncClient, engine: SpokenEngine, written: str, is_stream: bool
) -> None:
    engine.text = f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>'
    response = await tools_client.post(CHAT, json=chat_body(tools=TOOLS, stream=is_stream))
    assert response.status_code == 200
    assert "error" not in response.text
    assert "tool_calls" in response.text
