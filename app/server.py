"""The server of one replica: it owns text and one engine, and answers calls.

HTTP is left to `ingress`, placing and scaling replicas to `main`.
"""

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from functools import partial

from app.admission import Admission
from app.call import (
    Call,
    CallOptions,
    ChatCall,
    CompletionCall,
    DetokenizeCall,
    Reply,
    TokenCall,
    TokenizeCall,
)
from app.call_trace import SpanSink, TracedEngine
from app.chat import ChatTemplate
from app.choices import Limits, check_num_requests, check_token_ids, context_len, plan_requests
from app.echo import Echo, unanswered, with_echo, without_answer
from app.errors import UnknownModelError, event_for, reply_for, status_of
from app.generation import ChoiceDelta, TokenEngine, run_choices
from app.logprobs import JSON
from app.message_pace import MESSAGES_PER_SECOND, MessagePace, no_turn
from app.metrics import Histogram, ReplicaSnapshot
from app.outcomes import Ending, Outcomes, outcome_of
from app.prompts import Prompts
from app.streaming import (
    DONE,
    ChatForm,
    CompletionForm,
    Envelope,
    EventWriter,
    Form,
    Tally,
    dump,
    whole_body,
)
from app.tokenizer import Tokenizer
from app.tool_formats import OPEN_TAG, make_parser
from app.tool_stream import with_calls
from app.version import version
from engine import GrammarCompiler, Request, RequestError
from ops.tracing.context import TraceContext

Steps = AsyncGenerator[list[ChoiceDelta], None]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What /v1/models says of the served model."""

    name: str
    created: int
    max_model_len: int


class LLMServer:
    """Answers calls with one engine. `answer` yields one message per engine step,
    or of several steps where `pace` says so.

    The first message is either a `Reply`, which is the whole answer or an error, or the first events of a
    stream; nothing but more events follows those.
    """

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        name: str,
        limits: Limits,
        replica: str = "local",
        clock: Callable[[], float] = time.monotonic,
        sink: SpanSink | None = None,
        compiler: GrammarCompiler | None = None,
        pace: MessagePace | None = None,
    ) -> None:
        self._tracing = None if sink is None else TracedEngine(engine, sink, clock)
        self._engine = self._tracing or engine
        self._compiler = compiler
        self._pace = pace or MessagePace(MESSAGES_PER_SECOND)
        self._tokenizer = tokenizer
        self._prompts = Prompts(tokenizer, template)
        self._tool_format = template.tool_format
        self._has_special_tags = tokenizer.is_special(OPEN_TAG)
        self._name = name
        self._limits = limits
        self._admission = Admission(clock)
        self._outcomes = Outcomes()
        self._replica = replica
        self._clock = clock
        self._created = int(time.time())
        self._version = version()
        self._fingerprint = f"eyas-{self._version}-{engine.facts.model_digest[:8]}"
        self._queue = Histogram("eyas_queue_time_seconds")
        self._first_token = Histogram("eyas_time_to_first_token_seconds")
        self._per_token = Histogram("eyas_time_per_output_token_seconds")
        self._duration = Histogram("eyas_call_duration_seconds")

    def limit(self, limits: Limits) -> None:
        """Hold coming calls to other limits; those that run go on."""
        self._limits = limits

    def card(self) -> ModelCard:
        return ModelCard(self._name, self._created, context_len(self._engine.facts))

    def check_health(self) -> None:
        """Raise `EngineDeadError` where the engine core is gone or hangs."""
        self._engine.check_health()

    async def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            replica=self._replica,
            version=self._version,
            model=self._name,
            facts=self._engine.facts,
            stats=await self._engine.stats(),
            calls=self._outcomes.snapshot(),
            histograms=tuple(
                h.snapshot() for h in (self._queue, self._first_token, self._per_token, self._duration)
            ),
            busy_seconds=self._admission.busy_seconds,
        )

    async def shutdown(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
        await self._engine.shutdown()

    async def answer(
        self, call: Call, call_id: str, trace: TraceContext | None = None
    ) -> AsyncGenerator[bytes | Reply, None]:
        """Yield the answer of one call; an error before the first message is a `Reply`, later an event."""
        has_begun = False
        with self._outcomes.watch() as ending, self._traced(call, call_id, trace, ending):
            try:
                with self._admitted(call):
                    async with aclosing(self._messages(call, call_id, ending)) as messages:
                        async for message in messages:
                            has_begun = True
                            yield message
            except Exception as error:  # the edge of a call: every error becomes an answer
                ending.outcome = outcome_of(status_of(error))
                yield event_for(error) + DONE if has_begun else reply_for(error)

    def _admitted(self, call: Call) -> AbstractContextManager[None]:
        """Hold what a call will run; one that asks for too many is told so, not that others are ahead."""
        num_sequences = _num_prompts(call) * call.options.num_choices
        return self._admission.hold(
            min(num_sequences, self._limits.max_requests),
            self._engine.facts.max_num_seqs + self._limits.max_requests,
            self._limits.max_concurrent_calls,
        )

    def _traced(
        self, call: Call, call_id: str, trace: TraceContext | None, ending: Ending
    ) -> AbstractContextManager[None]:
        if self._tracing is None or trace is None:
            return nullcontext()
        return self._tracing.watch(call, call_id, trace, ending)

    async def _messages(
        self, call: Call, call_id: str, ending: Ending
    ) -> AsyncGenerator[bytes | Reply, None]:
        form: Form = ChatForm() if isinstance(call, ChatCall) else CompletionForm()
        self._check_model(call.options.model)
        options = await self._compiled(call.options)
        check_num_requests(_num_prompts(call), options.num_choices, form.prompt_field, self._limits)
        prompts = await self._encode(call)
        requests = plan_requests(
            call_id, prompts, options, self._engine.facts, form.prompt_field, self._limits
        )
        envelope = Envelope(form, call_id, int(time.time()), self._name, self._fingerprint)
        tally = Tally(sum(len(prompt) for prompt in prompts), options.num_choices)
        steps = self._steps(await self._run(call, requests))
        async with aclosing(steps):
            if options.is_stream:
                writer = EventWriter(envelope, tally, options)
                async for deltas in steps:
                    if events := writer.events(deltas):
                        yield events
                ending.outcome = "answered"  # a client may leave as soon as it has the last message
                yield writer.closing()
            else:
                collected = [delta async for deltas in steps for delta in deltas]
                ending.outcome = "answered"
                yield Reply(200, whole_body(envelope, tally, collected, options))

    async def _run(self, call: Call, requests: Sequence[Request]) -> Steps:
        """Return the steps of a call, with the echo or the calls of functions that it asks for."""
        if isinstance(call, CompletionCall):
            if not call.options.is_echoed:
                return self._plain_steps(call.options, requests)
            echoes = await self._echoes(call, requests)
            steps = self._plain_steps(call.options, requests)
            return with_echo(steps, echoes, self._tokenizer if call.options.shows_logprobs else None)
        if not call.shape.tools:
            return self._plain_steps(call.options, requests)
        options = call.options
        if self._has_special_tags:
            options = dataclasses.replace(options, skips_special_tokens=False)  # else no call is seen
        names = frozenset(tool.name for tool in call.shape.tools)
        parser = partial(make_parser, "llama3" if call.is_call_forced else self._tool_format, names)
        return with_calls(self._plain_steps(options, requests), parser, call.is_one_call)

    async def _compiled(self, options: CallOptions) -> CallOptions:
        """Return the options with their grammar compiled, where they have one."""
        grammar = options.sampling.grammar
        if grammar is None:
            return options
        if self._compiler is None:
            raise RequestError("this server cannot follow a grammar", grammar.parameter)
        compiled = await self._compiler.compile(grammar)
        return dataclasses.replace(options, sampling=dataclasses.replace(options.sampling, grammar=compiled))

    def _plain_steps(self, options: CallOptions, requests: Sequence[Request]) -> Steps:
        is_alone = options.max_tokens == 0
        if is_alone and not options.shows_logprobs:
            return unanswered(len(requests))
        turn = self._pace.turn if options.is_stream else no_turn
        steps = run_choices(self._engine, self._tokenizer, requests, options, turn)
        return without_answer(steps) if is_alone else steps

    async def _steps(self, run: Steps) -> Steps:
        """Yield the steps of a call and time them."""
        start = self._clock()
        first: dict[int, tuple[float, int]] = {}
        async with aclosing(run) as steps:
            async for deltas in steps:
                now = self._clock()
                if not first:
                    self._first_token.observe(now - start)
                for delta in deltas:
                    if delta.index not in first:
                        self._queue.observe(max(0.0, delta.started - start))
                    first_time, num_first = first.setdefault(delta.index, (now, delta.num_tokens))
                    if delta.end is not None and delta.num_tokens > num_first:
                        self._per_token.observe((now - first_time) / (delta.num_tokens - num_first))
                yield deltas
        self._duration.observe(self._clock() - start)

    async def _echoes(self, call: CompletionCall, requests: Sequence[Request]) -> list[Echo]:
        """Return what to begin each choice with."""
        texts = [
            prompt if isinstance(prompt, str) else await self._prompts.decode(prompt)
            for prompt in call.prompts
        ]
        repeated = [text for text in texts for _ in range(call.options.num_choices)]
        return [
            Echo(text, request.prompt_token_ids) for text, request in zip(repeated, requests, strict=True)
        ]

    async def reply(self, call: TokenCall) -> Reply:
        """Answer what needs the tokenizer only; errors are replies too."""
        try:
            if call.model is not None:
                self._check_model(call.model)
            body = await (self._tokenize(call) if isinstance(call, TokenizeCall) else self._detokenize(call))
        except Exception as error:  # the edge of a call: every error becomes an answer
            return reply_for(error)
        return Reply(200, dump(body))

    async def _tokenize(self, call: TokenizeCall) -> JSON:
        token_ids = await self._prompts.encode_as_asked(call)
        return {
            "count": len(token_ids),
            "max_model_len": context_len(self._engine.facts),
            "tokens": token_ids,
            "token_strs": self._prompts.token_texts(token_ids) if call.wants_texts else None,
        }

    async def _detokenize(self, call: DetokenizeCall) -> JSON:
        check_token_ids(call.token_ids, self._engine.facts, "tokens")
        return {"prompt": await self._prompts.decode(call.token_ids)}

    async def _encode(self, call: Call) -> list[tuple[int, ...]]:
        if isinstance(call, ChatCall):
            return [await self._prompts.encode_chat(call.messages, call.shape)]
        return [await self._prompts.encode(prompt) for prompt in call.prompts]

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise UnknownModelError(
                f"the model {name[:80]!r} does not exist here: this server has {self._name!r}", "model"
            )


def _num_prompts(call: Call) -> int:
    return 1 if isinstance(call, ChatCall) else len(call.prompts)
