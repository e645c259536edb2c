"""The OpenAI answers: whole bodies, and server-sent events byte for byte.

What the text is comes from `generation`; errors are worded in `errors`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from app.answer import AnswerEnd
from app.call import CallOptions
from app.generation import CallDelta, ChoiceDelta
from app.logprobs import JSON, ScoredToken, chat_logprobs, completion_logprobs
from app.speculation_stats import SpeculationStats
from app.whole_choice import WholeChoice, likeliest

DONE = b"data: [DONE]\n\n"


class Form(Protocol):
    """How chat and completions word the same content, as the `choices` of their bodies."""

    prefix: str
    prompt_field: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> JSON | None: ...
    def pieces(self, delta: ChoiceDelta) -> list[JSON]: ...
    def whole(self, choice: "WholeChoice") -> JSON: ...


class ChatForm:
    prefix = "chatcmpl"
    prompt_field = "messages"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> JSON | None:
        return self._choice(index, {"role": "assistant", "content": ""}, None)

    def pieces(self, delta: ChoiceDelta) -> list[JSON]:
        parts: list[JSON] = []
        if delta.text or (delta.tokens and not delta.calls):
            parts.append({"content": delta.text})
        if delta.calls:
            parts.append({"tool_calls": [_call_body(call) for call in delta.calls]})
        pieces = [self._choice(delta.index, part, None) for part in parts]
        if delta.tokens:
            pieces[0]["logprobs"] = chat_logprobs(delta.tokens)
        if delta.end is not None:
            pieces.append(self._choice(delta.index, {}, delta.end))
        return pieces

    def whole(self, choice: WholeChoice) -> JSON:
        message: JSON = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.calls
            ]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(choice.tokens) if choice.tokens else None,
            "finish_reason": choice.end,
        }

    def _choice(self, index: int, delta: JSON, end: AnswerEnd | None) -> JSON:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": end}


def _call_body(call: CallDelta) -> JSON:
    """Return a delta of a call: id and name stand in its first one, its number in each."""
    if call.call_id is None:
        return {"index": call.call_idx, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.call_idx, "id": call.call_id, "type": "function", "function": function}


class CompletionForm:
    prefix = "cmpl"
    prompt_field = "prompt"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> JSON | None:  # noqa: ARG002 - nothing comes before the text
        return None

    def pieces(self, delta: ChoiceDelta) -> list[JSON]:
        pieces = []
        if delta.text or delta.tokens:
            pieces.append(self._choice(delta.index, delta.text, None, delta.tokens))
        return pieces if delta.end is None else [*pieces, self._choice(delta.index, "", delta.end)]

    def whole(self, choice: WholeChoice) -> JSON:
        return self._choice(choice.index, choice.text, choice.end, choice.tokens)

    def _choice(
        self, index: int, text: str, end: AnswerEnd | None, tokens: Sequence[ScoredToken] = ()
    ) -> JSON:
        logprobs = completion_logprobs(tokens) if tokens else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": end}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is the same in every part of one answer."""

    form: Form
    call_id: str
    created: int
    model: str
    fingerprint: str

    def fields(self, object_name: str, choices: Sequence[JSON]) -> JSON:
        return {
            "id": f"{self.form.prefix}-{self.call_id}",
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


class Tally:
    """Counts the tokens of a call as they come; a prompt counts once, however many choices it has."""

    def __init__(self, num_prompt_tokens: int, num_choices: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_choices = num_choices
        self._num_tokens: dict[int, int] = {}
        self._num_cached: dict[int, int] = {}
        self._speculation = SpeculationStats()

    def add(self, delta: ChoiceDelta) -> None:
        self._num_tokens[delta.index] = delta.num_tokens
        if delta.index % self._num_choices == 0:
            self._num_cached[delta.index] = delta.num_cached
        for num_drafted, num_accepted in delta.drafts:
            self._speculation.observe(num_drafted, num_accepted)

    @property
    def num_completion_tokens(self) -> int:
        return sum(self._num_tokens.values())

    def usage(self) -> JSON:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
        }

    def metrics(self) -> JSON:
        """Return vLLM's object `metrics`, whose place is beside `usage`."""
        return {"speculative_decoding": self._speculation.body()}


class EventWriter:
    """Writes one streamed answer: opening, pieces, an ending per choice, usage where asked, `[DONE]`.

    With `includes_usage` every event carries `usage`: null, or the count so far where it is continuous.
    Statistics of speculation ride on the usage event, which comes without usage where only they are wanted.
    """

    def __init__(self, envelope: Envelope, tally: Tally, options: CallOptions) -> None:
        self._envelope = envelope
        self._tally = tally
        self._includes_usage = options.includes_usage
        self._is_continuous = options.has_continuous_usage
        self._includes_metrics = options.wants_speculation_stats
        self._open: set[int] = set()

    def events(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """Return the events of one step; empty where its text is still held back."""
        return b"".join(self._choice_events(delta) for delta in deltas)

    def closing(self) -> bytes:
        """Return the usage event where it was asked for, and `[DONE]`."""
        if not self._includes_usage and not self._includes_metrics:
            return DONE
        metrics = self._tally.metrics() if self._includes_metrics else None
        return self._event([], self._tally.usage(), metrics) + DONE

    def _choice_events(self, delta: ChoiceDelta) -> bytes:
        form = self._envelope.form
        events = b""
        if delta.index not in self._open:
            self._open.add(delta.index)
            if opening := form.opening(delta.index):
                events += self._event([opening], self._running_usage())
        self._tally.add(delta)
        for piece in form.pieces(delta):
            events += self._event([piece], self._running_usage())
        return events

    def _running_usage(self) -> JSON | None:
        return self._tally.usage() if self._is_continuous else None

    def _event(self, choices: Sequence[JSON], usage: JSON | None, metrics: JSON | None = None) -> bytes:
        body = self._envelope.fields(self._envelope.form.chunk_object, choices)
        if self._includes_usage or self._is_continuous:
            body["usage"] = usage
        if metrics is not None:
            body["metrics"] = metrics
        return b"data: " + dump(body) + b"\n\n"


def whole_body(
    envelope: Envelope, tally: Tally, deltas: Sequence[ChoiceDelta], options: CallOptions
) -> bytes:
    """Return the body of an answer that was not streamed, made of all its deltas."""
    choices: dict[int, WholeChoice] = {}
    for delta in deltas:
        tally.add(delta)
        choices.setdefault(delta.index, WholeChoice(delta.index)).add(delta)
    form = envelope.form
    answered = likeliest([choices[index] for index in sorted(choices)], options)
    body = envelope.fields(form.whole_object, [form.whole(choice) for choice in answered])
    body |= {"usage": tally.usage()}
    return dump(body | {"metrics": tally.metrics()} if options.wants_speculation_stats else body)


def dump(body: JSON) -> bytes:
    """Return JSON that no reader of lines cuts: Unicode's own line ends, which JSON may leave plain, are
    escaped.
    """
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    for char, escaped in _LINE_ENDS:
        text = text.replace(char, escaped)
    return text.encode()


_LINE_ENDS = (("\u0085", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))
