"""A byte-level tokenizer, an engine that says a given text, and what reads the application's answers.

The fixtures over them are left to `conftest`.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import tokenizers
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from app.call import Call, Reply, TokenCall
from app.call_trace import SpanSink
from app.chat import ChatTemplate
from app.choices import Limits
from app.ingress import FrontDoor, Ingress, Messages
from app.metrics import ReplicaSnapshot
from app.server import LLMServer, ModelCard
from app.tokenizer import Tokenizer
from engine import (
    NO_DRAFT,
    DraftStatus,
    EngineFacts,
    EngineStats,
    FinishReason,
    Request,
    SequenceDelta,
    TokenLogprob,
)
from engine.dispatch_stats import ArmTotal, DispatchStats
from ops.tracing.context import TraceContext

DISPATCH = DispatchStats(
    arm="chain-3",
    reason="best",
    tokens_per_second=360.0,
    plain_tokens_per_second=64.0,
    num_switches=5,
    num_probes=4,
    num_alarms=3,
    num_trips=2,
    totals=(ArmTotal("chain-3", 40, 900, 2.5), ArmTotal("off", 4, 32, 0.5)),
)
MAX_MODEL_LEN = 512
MAX_NUM_WAITING = 64
EOS_ID = 1
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, words: Sequence[str] = ()) -> None:
    """Write a byte-level tokenizer (two special tokens, one token per byte, one per word) and a chat
    template.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|im_start|>": 0, "<|im_end|>": 1} | {char: idx + 2 for idx, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(list(words))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_facts() -> EngineFacts:
    return EngineFacts(
        model_name="tiny",
        model_folder="models/tiny",
        model_digest="0123456789abcdef",
        draft_digest=None,
        dtype="float32",
        device="cpu",
        attention_backend="reference",
        num_threads=1,
        vocab_size=258,
        eos_token_ids=(1,),
        max_model_len=MAX_MODEL_LEN,
        max_batched_tokens=64,
        max_num_seqs=8,
        block_size=16,
        num_blocks=33,
        trees=("off", "chain-3", "tree-8"),
    )


@dataclass
class SpokenEngine:
    """Says `text`, `run_len` tokens a step, then the end-of-sequence token; every request is recorded.

    All tokens of a step but the last are accepted drafts, of four.
    """

    tokenizer: Tokenizer
    text: str = "Hello, world"
    run_len: int = 3
    facts: EngineFacts = field(default_factory=make_facts)
    requests: list[Request] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    start_error: Exception | None = None
    failure: SequenceDelta | None = None
    health_error: Exception | None = None
    num_steps_before_stall: int | None = None
    score: Callable[[Request, int], float] = lambda request, idx: -(idx + 1) / 8
    dispatch: DispatchStats = DISPATCH
    draft: DraftStatus = NO_DRAFT

    async def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        self.requests.append(request)
        if self.start_error is not None:
            raise self.start_error
        self.running.add(request.request_id)
        is_complete = False
        try:
            async for delta in self._say(request):
                # The engine has let go of the sequence before anybody reads its last delta.
                is_complete = delta.finish_reason is not None
                yield delta
        finally:
            self.running.discard(request.request_id)
            if not is_complete and request.request_id not in self.finished:
                self.aborted.append(request.request_id)

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)

    async def _say(self, request: Request) -> AsyncIterator[SequenceDelta]:
        ids = [*self.tokenizer.encode(self.text, add_special_tokens=False), 1]
        ids = ids[: request.sampling.max_tokens]
        for step, start in enumerate(range(0, len(ids), self.run_len)):
            if step == self.num_steps_before_stall:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            if step == 1 and self.failure is not None:
                yield self.failure
                return
            run = tuple(ids[start : start + self.run_len])
            reason = None
            if start + self.run_len >= len(ids):
                reason = FinishReason.STOP if run[-1] == 1 else FinishReason.LENGTH
            num_kept = start - step + len(run) - 1
            scores = self._scores(request, ids[: start + self.run_len])[start:]
            wanted = request.sampling.logprobs
            prompt = self._scores(request, list(request.prompt_token_ids))[1:]
            if step == 0 and wanted is not None and wanted.scores_prompt and prompt:
                yield SequenceDelta(request.request_id, (), 0, None, 0, 0, 0, 4, logprobs=prompt)
            yield SequenceDelta(
                request.request_id,
                run,
                len(run) - 1,
                reason,
                step + 1,
                4 * (step + 1),
                num_kept,
                4,
                logprobs=scores,
            )

    def _scores(self, request: Request, token_ids: list[int]) -> tuple[TokenLogprob, ...]:
        """Score each token by its place; the likeliest are 2 and those behind it, less likely one by one."""
        wanted = request.sampling.logprobs
        if wanted is None:
            return ()
        scores = [self.score(request, idx) for idx in range(len(token_ids))]
        return tuple(
            TokenLogprob(score, tuple((2 + rank, score - rank) for rank in range(wanted.num_top)))
            for score in scores
        )

    async def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=0,
            num_free_blocks=30,
            num_held_blocks=2,
            num_cached_blocks=1,
            num_steps=10,
            num_calls=20,
            num_drafts=18,
            num_drafted=60,
            num_accepted=25,
            num_prompt_tokens=100,
            num_prefix_hit_tokens=16,
            num_output_tokens=45,
            num_preemptions=0,
            num_finished=5,
            num_aborted=len(self.aborted),
            num_failed=0,
            accepted_by_depth=(15, 7, 3),
            steps_by_tree=(("chain-3", 8), ("off", 2)),
            step_seconds=1.5,
            dispatch=self.dispatch,
            draft=self.draft,
            steps_by_rows=((1, 8), (2, 1)),
            steps_by_time=(0, 4, *(0,) * 9, 5, 0, 0, 0, 1),
        )

    def check_health(self) -> None:
        if self.health_error is not None:
            raise self.health_error

    async def shutdown(self) -> None:
        return None


class LocalBackend:
    """One server in this process, as an ingress sees it."""

    def __init__(self, server: LLMServer) -> None:
        self._server = server

    def answer(self, call: Call, call_id: str, trace: TraceContext | None = None) -> Messages:
        return self._server.answer(call, call_id, trace)

    async def reply(self, call: TokenCall) -> Reply:
        return await self._server.reply(call)

    async def card(self) -> ModelCard:
        return self._server.card()

    async def snapshots(self) -> list[ReplicaSnapshot]:
        return [await self._server.snapshot()]

    async def check_health(self) -> None:
        self._server.check_health()


def make_application(
    engine: SpokenEngine,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    limits: Limits | None = None,
    door: FrontDoor | None = None,
    sink: SpanSink | None = None,
) -> FastAPI:
    """Return the HTTP front over one server in this process."""
    limits = limits or Limits(MAX_NUM_WAITING)
    server = LLMServer(engine, tokenizer, template, "tiny", limits, sink=sink)
    return Ingress(LocalBackend(server), "0.1.0", door or FrontDoor(max_body_bytes=100_000)).build()


def client_of(application: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://test")


@contextmanager
def serving(application: ASGIApp) -> Iterator[str]:
    """Yield the address of a server that runs `application` in a thread."""
    config = uvicorn.Config(application, port=free_port(), log_level="error", loop="asyncio")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{config.port}"
    finally:
        server.should_exit = True
        thread.join()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def chat_body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | fields


def completion_body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "Once", "max_tokens": 64} | fields


def events(body: str) -> list[dict[str, object]]:
    """Parse a stream of server-sent events, which must end with `[DONE]`."""
    blocks = body.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], blocks[-2:]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
