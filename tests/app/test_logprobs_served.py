"""Log-probabilities through HTTP, engine core and speculation are those of `transformers` for the same
text.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM

from app.config import ServerConfig
from app.ingress import FrontDoor, Ingress
from app.replica import Replica
from app.tokenizer import Tokenizer
from tests.app.harness import LocalBackend, chat_body, client_of, completion_body, events
from tests.app.tiny_model import write_random_draft, write_random_model

TOLERANCE = 1e-4
PROMPT = "The eagle é "
NUM_TOP = 4
SPECULATIONS = ("off", "chain-3", "tree-8", "auto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_random_model(folder)
    write_random_draft(folder / "draft")
    return folder


class Reference:
    """The model as `transformers` runs it, and the ids of its tokens, each of which is one byte or
    special.
    """

    def __init__(self, folder: Path) -> None:
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = Tokenizer(folder)
        self.ids = {self._tokenizer.token_bytes[token_id]: token_id for token_id in range(258)}

    def encode(self, text: str) -> tuple[int, ...]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def id_of(self, spelling: str) -> int:
        """Return the id of a token as completions spell it."""
        raw = spelling.encode()
        if spelling.startswith("bytes:"):
            raw = bytes.fromhex(spelling.removeprefix("bytes:").replace("\\x", ""))
        return self.ids[raw]

    @torch.inference_mode()
    def check(
        self,
        token_ids: Sequence[int],
        num_unscored: int,
        logprobs: Sequence[float],
        tops: Sequence[dict[int, float]],
    ) -> None:
        """Compare what was told of all tokens but the first `num_unscored` with one pass over the text."""
        rows = self._model(torch.tensor([token_ids])).logits[0].log_softmax(-1)[num_unscored - 1 : -1]
        assert len(logprobs) == len(tops) == len(token_ids) - num_unscored
        told = zip(rows, token_ids[num_unscored:], logprobs, tops, strict=True)
        for row, token_id, logprob, top in told:
            assert logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
            assert {idx: row[idx].item() for idx in top} == pytest.approx(top, abs=TOLERANCE)
            best = row.topk(NUM_TOP).values.tolist()
            assert sorted(top.values(), reverse=True)[:NUM_TOP] == pytest.approx(best, abs=TOLERANCE)


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = ServerConfig(
        model=str(folder), draft=str(folder / "draft"), engine={"dtype": "float32", "max_num_seqs": 3}
    )
    server = (await Replica.start(config)).server
    application = Ingress(LocalBackend(server), "0.1.0", FrontDoor(max_body_bytes=100_000)).build()
    async with client_of(application) as client:
        yield client
    await server.shutdown()


async def chat(client: httpx.AsyncClient, reference: Reference, name: str, speculation: str) -> int:
    """Check two sampled choices of a chat; return how many drafts were kept."""
    prompt = reference.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    fields = {"model": name, "logprobs": True, "top_logprobs": NUM_TOP, "n": 2, "seed": 5, "max_tokens": 24}
    fields |= {
        "temperature": 0.6,
        "frequency_penalty": 0.5,
        "speculation": speculation,
        "stream_options": {"include_usage": True},
    }
    body = chat_body(stream=True, speculation_stats=True, **fields)
    bodies = events((await client.post("/v1/chat/completions", json=body)).text)
    for index in (0, 1):
        choices = [choice for body in bodies for choice in body["choices"] if choice["index"] == index]
        tokens = [t for choice in choices if choice["logprobs"] for t in choice["logprobs"]["content"]]
        ids = [reference.ids[bytes(token["bytes"])] for token in tokens]
        tops = [
            {reference.ids[bytes(top["bytes"])]: top["logprob"] for top in token["top_logprobs"]}
            for token in tokens
        ]
        reference.check([*prompt, *ids], len(prompt), [token["logprob"] for token in tokens], tops)
    assert bodies[-1]["usage"]["completion_tokens"] == sum(
        len(choice["logprobs"]["content"])
        for body in bodies
        for choice in body["choices"]
        if choice["logprobs"]
    )
    return int(bodies[-1]["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"])


async def completion(client: httpx.AsyncClient, reference: Reference, name: str, max_tokens: int) -> None:
    """Check a completion with the prompt's own tokens."""
    fields = {"model": name, "prompt": PROMPT, "logprobs": NUM_TOP, "echo": True, "temperature": 0}
    answer = await client.post("/v1/completions", json=completion_body(**fields, max_tokens=max_tokens))
    choice = answer.json()["choices"][0]
    told = choice["logprobs"]
    ids = [reference.id_of(token) for token in told["tokens"]]
    assert tuple(ids[: len(PROMPT.encode())]) == reference.encode(PROMPT)
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    tops = [
        {reference.id_of(token): logprob for token, logprob in top.items()}
        for top in told["top_logprobs"][1:]
    ]
    reference.check(ids, 1, told["token_logprobs"][1:], tops)
    assert answer.json()["usage"]["completion_tokens"] == len(ids) - len(PROMPT.encode())


async def test_answers_tell_what_the_model_says(client: httpx.AsyncClient, folder: Path) -> None:
    reference = Reference(folder)
    accepted = await asyncio.gather(*(chat(client, reference, folder.name, name) for name in SPECULATIONS))
    assert accepted[0] == 0
    assert min(accepted[1:3]) > 0, "auto is the dispatcher's to choose"
    for max_tokens in (0, 1, 20, 20):  # the last one finds its prompt in the prefix cache
        await completion(client, reference, folder.name, max_tokens)


async def test_the_likeliest_of_several_is_the_one_that_the_model_says(
    client: httpx.AsyncClient, folder: Path
) -> None:
    fields = {"model": folder.name, "prompt": PROMPT, "seed": 3, "max_tokens": 12, "logprobs": 0}
    drawn = (await client.post("/v1/completions", json=completion_body(**fields, n=5))).json()["choices"]
    best = (await client.post("/v1/completions", json=completion_body(**fields, best_of=5, n=2))).json()
    ranked = sorted(
        drawn,
        key=lambda choice: (
            -sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])
        ),
    )
    assert len({choice["text"] for choice in drawn}) == 5
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
