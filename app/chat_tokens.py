"""Chats as tokens for training and evaluation: what is given, and where the model's own answers lie.

The template and the tokenizer are left to `chat` and `tokenizer`, answering to the engine.
"""

import dataclasses
from collections.abc import Sequence

from app.call import Message
from app.chat import ChatTemplate
from app.prompt_file import ASSISTANT, USER, Chat
from app.tokenizer import Tokenizer
from engine import ConfigError
from engine.training.dialogue import TurnFrame

_FIRST, _ANSWER, _SECOND = "first-turn-of-the-user", "answer-of-the-model", "second-turn-of-the-user"


class ChatTokens:
    """The token side of one model's chats; `eos_token_ids` are the tokens by which it ends an answer."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._eos = frozenset(eos_token_ids)
        self._frame = self._find_frame()

    def frame(self, beginnings: Sequence[tuple[int, ...]] = ()) -> TurnFrame:
        """Return what the template writes around turns, beside `beginnings` for first turns of the user."""
        return dataclasses.replace(self._frame, beginnings=tuple(beginnings))

    def given_turns(self, chat: Chat) -> list[tuple[int, ...]]:
        """Return what the model is given before each answer it has to write, each after the one before.

        Answers that a chat brings along are context. Raises `ConfigError` where a turn of the user without
        an answer is followed by one that has it, or nothing is left to answer.
        """
        turns: list[tuple[int, ...]] = []
        for idx, message in enumerate(chat.messages):
            is_open = message.role == USER and (
                idx + 1 == len(chat.messages) or chat.messages[idx + 1].role != ASSISTANT
            )
            if not turns:
                if is_open:
                    turns.append(self._encode(self._template.render(chat.messages[: idx + 1])))
            elif is_open:
                text = self._encode(message.content)
                turns.append((*self._frame.user_opening, *text, *self._frame.answer_opening))
            else:
                raise ConfigError(
                    "a chat must not have answers after a turn without one: leave all answers out, or none"
                )
        if not turns:
            raise ConfigError("a chat has no turn of the user to answer")
        return turns

    def encode_answered(self, chat: Chat) -> tuple[list[int], list[bool]]:
        """Return (token ids, flags) of a whole conversation; the flags mark its answers and their ends.

        Raises `ConfigError` where the template writes earlier turns anew, as none does that the model was
        trained on turn by turn.
        """
        token_ids: list[int] = []
        is_answer: list[bool] = []
        text = ""

        def give(given: Sequence[int]) -> None:
            ends_answer = bool(token_ids) and given[:1] != () and given[0] in self._eos
            token_ids.extend(given)
            is_answer.extend([ends_answer, *[False] * (len(given) - 1)])

        for idx, message in enumerate(chat.messages):
            if message.role != ASSISTANT:
                continue
            prompt = self._template.render(chat.messages[:idx])
            answer = message.content.strip()
            if not prompt.startswith(text):
                raise ConfigError("the chat template changes earlier turns: train on one turn per line")
            give(self._encode(prompt[len(text) :]))
            answer_ids = self._encode(answer)
            token_ids.extend(answer_ids)
            is_answer.extend([True] * len(answer_ids))
            text = prompt + answer
        if self._frame.user_opening[0] in self._eos:
            give(self._frame.user_opening[:1])
        return token_ids, is_answer

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the tokens of plain text, as the beginning of a turn of the user."""
        return self._encode(text)

    def _find_frame(self) -> TurnFrame:
        turns = (Message(USER, _FIRST), Message(ASSISTANT, _ANSWER), Message(USER, _SECOND))
        opening, first, rest = self._template.render(turns).partition(_FIRST)
        answer_opening, answer, rest = rest.partition(_ANSWER)
        user_opening, second, _ = rest.partition(_SECOND)
        if not (first and answer and second and answer_opening and user_opening):
            raise ConfigError("the chat template does not write the turns of a chat one after the other")
        return TurnFrame(self._encode(opening), self._encode(answer_opening), self._encode(user_opening))

    def _encode(self, text: str) -> tuple[int, ...]:
        return self._tokenizer.encode(text, add_special_tokens=False)
