"""The bodies of /tokenize and /detokenize, as vLLM's clients write them.

The rules for bodies and messages are those of `protocol`.
"""

from typing import Self

from pydantic import Field, model_validator

from app.call import DetokenizeCall, TokenizeCall
from app.protocol import Body, MessageBody, parse
from engine import RequestError


class TokenizeBody(Body):
    """A `prompt`, or the `messages` of a chat; special tokens are added to a prompt unless told otherwise."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send either prompt or messages", "prompt")
        return self

    def to_call(self) -> TokenizeCall:
        is_chat = self.messages is not None
        return TokenizeCall(
            model=self.model,
            source=self.prompt
            if self.prompt is not None
            else tuple(message.to_message() for message in self.messages or ()),
            adds_special_tokens=not is_chat if self.add_special_tokens is None else self.add_special_tokens,
            adds_generation_prompt=self.add_generation_prompt,
            wants_texts=bool(self.return_token_strs),
        )


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]

    def to_call(self) -> DetokenizeCall:
        return DetokenizeCall(self.model, tuple(self.tokens))


def parse_tokenize(body: bytes) -> TokenizeCall:
    """Return the call that a body of /tokenize asks for, or raise `RequestError`."""
    return parse(TokenizeBody, body).to_call()


def parse_detokenize(body: bytes) -> DetokenizeCall:
    """Return the call that a body of /detokenize asks for, or raise `RequestError`."""
    return parse(DetokenizeBody, body).to_call()
