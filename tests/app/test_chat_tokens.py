"""Chats as tokens: the same text as the template writes whole, and flags on what the model says."""

import json
from pathlib import Path

import pytest

from app.call import Message
from app.chat import ChatTemplate
from app.chat_tokens import ChatTokens
from app.prompt_file import Chat
from app.tokenizer import Tokenizer
from engine import ConfigError

END = 1  # <|im_end|> of the byte-level tokenizer
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}"
    "<|im_end|>{% endif %}{% endfor %}"
)


def say(*turns: str) -> tuple[Message, ...]:
    """Messages of user and assistant in turn."""
    return tuple(Message(("user", "assistant")[idx % 2], turn) for idx, turn in enumerate(turns))


@pytest.fixture
def tokens(model_folder: Path, tokenizer: Tokenizer) -> ChatTokens:
    return ChatTokens(ChatTemplate(model_folder), tokenizer, (END,))


def make_tokens(folder: Path, tokenizer: Tokenizer, template: str) -> ChatTokens:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return ChatTokens(ChatTemplate(folder), tokenizer, (END,))


CHATS = [
    say("Hi", "Hello."),
    say("Hi", "Hello.", "And?", " More. "),
    (Message("system", "Be brief."), *say("Hi", "Hello.", "And?", "No.", "Why?", "So.")),
]


@pytest.mark.parametrize("messages", CHATS)
def test_an_answered_chat_is_the_text_of_its_template(
    tokens: ChatTokens, tokenizer: Tokenizer, messages: tuple[Message, ...]
) -> None:
    token_ids, is_answer = tokens.encode_answered(Chat(messages))
    expected = "".join(f"<|im_start|>{m.role}\n{m.content.strip()}<|im_end|>\n" for m in messages)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == expected.removesuffix("\n")
    assert len(token_ids) == len(is_answer)
    answered = [idx for idx, flag in zip(token_ids, is_answer, strict=True) if flag]
    answers = [m.content.strip() for m in messages if m.role == "assistant"]
    assert tokenizer.decode(answered, skip_special_tokens=False) == "".join(f"{a}<|im_end|>" for a in answers)


def test_turns_to_answer_join_to_the_text_of_the_template(tokens: ChatTokens, tokenizer: Tokenizer) -> None:
    chat = Chat((Message("system", "s"), Message("user", "one"), Message("user", "two")))
    first, second = tokens.given_turns(chat)
    assert tokenizer.decode(first, skip_special_tokens=False) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(second, skip_special_tokens=False) == (
        "<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )


def test_earlier_answers_are_context(tokens: ChatTokens, tokenizer: Tokenizer) -> None:
    (given,) = tokens.given_turns(Chat(say("one", "1", "two")))
    assert tokenizer.decode(given, skip_special_tokens=False).count("<|im_end|>") == 3


@pytest.mark.parametrize(
    "messages",
    [say("one", "1"), (Message("system", "s"),), (Message("user", "one"), *say("two", "2"))],
)
def test_chats_without_a_turn_to_answer_or_with_gaps_are_refused(
    tokens: ChatTokens, messages: tuple[Message, ...]
) -> None:
    with pytest.raises(ConfigError):
        tokens.given_turns(Chat(messages))


def test_the_frame_is_what_stands_between_the_turns(tmp_path: Path, tokenizer: Tokenizer) -> None:
    frame = make_tokens(tmp_path, tokenizer, BRACKETS).frame([(5, 6)])
    assert tokenizer.decode(frame.opening, skip_special_tokens=False) == "[INST] "
    assert tokenizer.decode(frame.answer_opening, skip_special_tokens=False) == " [/INST] "
    assert tokenizer.decode(frame.user_opening, skip_special_tokens=False) == "<|im_end|>[INST] "
    assert frame.beginnings == ((5, 6),)


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    template = "{{ messages | length }}:" + BRACKETS
    tokens = make_tokens(tmp_path, tokenizer, template)
    with pytest.raises(ConfigError, match="earlier turns"):
        tokens.encode_answered(Chat(say("a", "b", "c", "d")))


def test_a_template_that_hides_turns_has_no_frame(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="one after the other"):
        make_tokens(tmp_path, tokenizer, "{{ messages[-1].content }}")


@pytest.mark.parametrize(
    ("messages", "is_answered"),
    [
        (say("a", "b"), True),
        ((Message("system", "s"), *say("a", "b", "c", "d")), True),
        (say("a"), False),
        (say("a", "b", "c"), False),
        ((Message("user", "a"), Message("user", "b"), Message("assistant", "c")), False),
        ((), False),
    ],
)
def test_a_chat_is_answered_where_every_turn_is(messages: tuple[Message, ...], is_answered: bool) -> None:
    assert Chat(messages).is_answered == is_answered
