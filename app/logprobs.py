"""Log-probabilities of a choice's tokens, and OpenAI's two forms of them.

Which tokens belong to a choice is left to `answer`, how they were scored to the engine.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.tokenizer import Tokenizer
from engine import IncrementalDetokenizer, TokenLogprob

_NO_PROBABILITY = -9999.0  # OpenAI's number for minus infinity, which JSON cannot hold
JSON = dict[str, object]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that might have stood somewhere: its bytes, maybe part of a character, and its logprob."""

    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of a choice. `offset` counts the characters of the choice's text before it; where several
    tokens make one character, all of them have its place. `logprob` None: nothing predicted it, as it is
    the first of a prompt.
    """

    raw: bytes
    logprob: float | None
    top: tuple[Candidate, ...]
    offset: int

    def moved(self, num_characters: int) -> "ScoredToken":
        """Return the same token so many characters later, but never before the text."""
        return dataclasses.replace(self, offset=max(0, self.offset + num_characters))


def scored_token(tokenizer: Tokenizer, token_id: int, logprob: TokenLogprob, offset: int) -> ScoredToken:
    """Return what the engine said of a token, spelled out."""
    top = tuple(Candidate(tokenizer.token_bytes[other], value) for other, value in logprob.top)
    return ScoredToken(tokenizer.token_bytes[token_id], logprob.logprob, top, offset)


def scored_prompt(
    tokenizer: Tokenizer, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> tuple[ScoredToken, ...]:
    """Return the tokens of a prompt that is echoed as `text`; `logprobs` has all of them but the first.

    Tokens that the tokenizer put in front of the text have its beginning as their place.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
    detokenizer.append(token_ids)
    detokenizer.flush()
    *ends, decoded_len = detokenizer.text_lens
    first = ScoredToken(tokenizer.token_bytes[token_ids[0]], None, (), 0)
    rest = zip(token_ids[1:], logprobs, ends, strict=True)
    num_added = decoded_len - len(text)
    return (first, *(scored_token(tokenizer, *entry).moved(-num_added) for entry in rest))


def chat_logprobs(tokens: Iterable[ScoredToken]) -> JSON:
    """Return the object `logprobs` of a chat's choice. Every token has its true bytes; text that is no whole
    character is escaped.
    """
    return {"content": [_chat_token(token) for token in tokens], "refusal": None}


def _chat_token(token: ScoredToken) -> JSON:
    assert token.logprob is not None, "only prompts have a first token"
    body = _chat_candidate(Candidate(token.raw, token.logprob))
    return body | {"top_logprobs": [_chat_candidate(candidate) for candidate in token.top]}


def _chat_candidate(candidate: Candidate) -> JSON:
    return {
        "token": candidate.raw.decode(errors="backslashreplace"),
        "logprob": _number(candidate.logprob),
        "bytes": list(candidate.raw),
    }


def completion_logprobs(tokens: Sequence[ScoredToken]) -> JSON:
    """Return the object `logprobs` of a completion's choice: lists side by side, an entry per token.

    The likeliest tokens of a place are keyed by their text, the token that stands there among them.
    """
    return {
        "tokens": [_spelling(token.raw) for token in tokens],
        "token_logprobs": [None if token.logprob is None else _number(token.logprob) for token in tokens],
        "top_logprobs": [_top(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _top(token: ScoredToken) -> JSON | None:
    if token.logprob is None:
        return None
    top: JSON = {}
    for candidate in (*token.top, Candidate(token.raw, token.logprob)):
        top.setdefault(_spelling(candidate.raw), _number(candidate.logprob))
    return top


def _spelling(raw: bytes) -> str:
    """Return a token's text; what is no whole character is written as OpenAI does, so that keys differ."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _number(logprob: float) -> float:
    return max(logprob, _NO_PROBABILITY)
