"""Chat templates: the same prompt as transformers gives, in a sandbox, with clear errors."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from app.call import Message, PromptShape
from app.chat import ChatTemplate
from engine import ModelLoadError, RequestError

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCKS = """{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
  {{ bos_token }}[{{ m['role'] | upper }}] {{ m | tojson }}
{% endfor %}
{%- if add_generation_prompt %}
>>
{%- endif %}"""
CHAT = (
    Message("system", "Be <b>brief</b>."),
    Message("user", 'Grüße & "quotes"'),
    Message("assistant", "ok"),
)


def template(folder: Path, **config: object) -> ChatTemplate:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTemplate(folder)


@pytest.mark.parametrize("source", [SMOLLM2, BLOCKS])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:2], CHAT[:2]])
def test_prompt_equals_that_of_transformers(
    model_folder: Path, tmp_path: Path, source: str, messages: tuple[Message, ...]
) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_file=str(model_folder / "tokenizer.json"), bos_token="<s>")
    expected = reference.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages],
        chat_template=source,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert template(tmp_path, chat_template=source, bos_token="<s>").render(messages) == expected


def test_special_tokens_may_be_objects_and_templates_named(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}x"}]
    assert template(tmp_path, chat_template=named, bos_token={"content": "<s>"}).render(CHAT) == "<s>x"


def test_file_wins_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert template(tmp_path, chat_template="from the config").render(CHAT) == "from the file"


def test_name_of_a_message_reaches_the_template(tmp_path: Path) -> None:
    built = template(tmp_path, chat_template="{{ messages[0].name }}")
    assert built.render([Message("user", "x", "Ada")]) == "Ada"


def test_date_is_available(tmp_path: Path) -> None:
    assert int(template(tmp_path, chat_template="{{ strftime_now('%Y') }}").render(CHAT)) >= 2025


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 + 'x' }}", "unsupported operand"),
    ],
)
def test_template_that_refuses_raises_a_request_error(tmp_path: Path, source: str, match: str) -> None:
    with pytest.raises(RequestError, match=match) as error:
        template(tmp_path, chat_template=source).render(CHAT)
    assert error.value.parameter == "messages"


def test_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="/v1/completions"):
        ChatTemplate(tmp_path).render(CHAT)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_broken_config_is_a_load_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match="JSON"):
        ChatTemplate(tmp_path)


def test_broken_template_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="Jinja"):
        template(tmp_path, chat_template="{% for %}")


CONTINUED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
OPEN_CHAT = (Message("user", "Count"), Message("assistant", "one, two, "))


def test_last_message_can_be_left_open_with_its_last_space(tmp_path: Path) -> None:
    built = template(tmp_path, chat_template=CONTINUED)
    shape = PromptShape(adds_generation_prompt=False, continues_final=True)
    assert built.render(OPEN_CHAT, shape) == "[user]Count[end][assistant]one, two, "
    assert built.render(OPEN_CHAT, PromptShape(adds_generation_prompt=False)).endswith("one, two,[end]")


def test_last_message_that_a_template_leaves_out_cannot_be_continued(tmp_path: Path) -> None:
    built = template(tmp_path, chat_template="{{ messages[0].content }}")
    with pytest.raises(RequestError) as caught:
        built.render(OPEN_CHAT, PromptShape(continues_final=True))
    assert caught.value.parameter == "continue_final_message"


def test_arguments_reach_the_template_but_replace_nothing_of_ours(tmp_path: Path) -> None:
    built = template(tmp_path, chat_template="{{ mood }}{{ bos_token }}", bos_token="<s>")
    assert built.render(CHAT, PromptShape(arguments={"mood": "calm"})) == "calm<s>"
    for name in ("messages", "tools", "add_generation_prompt", "bos_token"):
        with pytest.raises(RequestError, match=name) as caught:
            built.render(CHAT, PromptShape(arguments={name: "x"}))
        assert caught.value.parameter == "chat_template_kwargs"
