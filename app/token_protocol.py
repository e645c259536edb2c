"""The bodies of /tokenize and /detokenize, as vLLM's clients write them.

What every body has in common is in `body`, messages are in `chat_protocol`.
"""

from typing import Self

from pydantic import Field, model_validator

from app.body import Body, parse
from app.call import PLAIN_SHAPE, DetokenizeCall, TokenizeCall
from app.chat_protocol import MessageBody, ShapeFields
from engine import RequestError


class TokenizeBody(ShapeFields):
    """A `prompt`, or the `messages` of a chat; special tokens are added to a prompt unless told otherwise."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send either prompt or messages", "prompt")
        return self

    def to_call(self) -> TokenizeCall:
        is_chat = self.prompt is None
        return TokenizeCall(
            model=self.model,
            source=tuple(m.to_message() for m in self.messages or ()) if self.prompt is None else self.prompt,
            adds_special_tokens=not is_chat if self.add_special_tokens is None else self.add_special_tokens,
            wants_texts=bool(self.return_token_strs),
            shape=self.shape(self.messages[-1]) if self.messages else PLAIN_SHAPE,
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
