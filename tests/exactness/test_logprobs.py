"""Log-probabilities under speculation are the target's own: those of a forward pass over the whole text."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from engine.engine import Engine
from engine.errors import RequestError
from engine.layers.rotary import rotate_qkv
from engine.logprobs import TokenLogprob, WantedLogprobs
from engine.request import FinishReason, Request
from engine.runner.runner import ModelRunner
from tests.exactness.head import build_drafter
from tests.exactness.oracle import FIRST, VARYING, AdversarialDrafter, OracleDrafter
from tests.exactness.test_identity import ShufflingRunner
from tests.exactness.tiny import EOS, EngineShape, build_engine, build_target, prompts, request_of

TARGET = build_target()
NUM_TOP = 5
TOLERANCE = 1e-4
SAMPLINGS = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.9},
    "warped": {"temperature": 0.7, "frequency_penalty": 1.5, "logit_bias": ((7, 6.0), (8, -50.0))},
}
MODES = ("off", "chain-3", "chain-7", "tree-8", "tree-64")
Outputs = dict[str, tuple[int, ...]]
Logprobs = dict[str, list[TokenLogprob]]


def dense_logprobs(tokens: Sequence[int]) -> torch.Tensor:
    """Return [T, V] float32: log_softmax at every position, of one pass without pages, trees or chunks."""
    size = len(tokens)
    future = torch.ones(size, size, dtype=torch.bool).triu(1)

    def attend(layer_idx, qkv, angles):
        q, k, v = rotate_qkv(qkv, angles, TARGET.config.num_kv_heads)
        k, v = (x.repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * 8**-0.5
        return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(0, 1)

    output = TARGET(torch.tensor(tokens), torch.arange(size), attend)
    return TARGET.logits(output.hidden).log_softmax(-1)


def check(request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
    """Compare each entry with a dense pass over prompt and answer."""
    assert len(logprobs) == len(tokens)
    first = len(request.prompt_token_ids) - 1
    truth = dense_logprobs((*request.prompt_token_ids, *tokens))[first:-1]
    num_top = request.sampling.logprobs.num_top
    for row, token, entry in zip(truth, tokens, logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=TOLERANCE)
        best = row.topk(num_top)
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=TOLERANCE)
        assert all(row[idx].item() == pytest.approx(value, abs=TOLERANCE) for idx, value in entry.top)
        assert len({idx for idx, _ in entry.top}) == len(entry.top) == num_top
        values = [logprob for _, logprob in entry.top]
        assert values == sorted(values, reverse=True)


def run(engine: Engine, asked: list[Request]) -> tuple[Outputs, Logprobs]:
    """Run requests to their end; every step's tokens and logprobs come together."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
    logprobs: Logprobs = {request.request_id: [] for request in asked}
    asking = {r.request_id for r in asked if r.sampling.logprobs is not None}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            assert delta.message is None, delta.message
            assert len(delta.logprobs) == (len(delta.token_ids) if delta.request_id in asking else 0)
            tokens[delta.request_id] += delta.token_ids
            logprobs[delta.request_id] += delta.logprobs
    return {name: tuple(ids) for name, ids in tokens.items()}, logprobs


def requests(sampling: str, num: int = 4, shared: int = 0, **params: object) -> list[Request]:
    params = {**SAMPLINGS[sampling], "logprobs": WantedLogprobs(NUM_TOP), "max_tokens": 18, **params}
    return [
        request_of(f"r{idx}", prompt, 100 + idx, **params)
        for idx, prompt in enumerate(prompts(num, shared=shared))
    ]


def silent(asked: list[Request]) -> list[Request]:
    return [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, logprobs=None)) for r in asked]


def plain(asked: list[Request]) -> Outputs:
    """Return what plain decoding gives each request alone where nobody asks for logprobs."""
    engine = build_engine(TARGET, None, EngineShape(enable_prefix_cache=False))
    return {name: ids for request in silent(asked) for name, ids in run(engine, [request])[0].items()}


def oracle(asked: list[Request], outputs: Outputs, choose=VARYING) -> OracleDrafter:
    return OracleDrafter(texts(asked, outputs), choose)


def texts(asked: list[Request], outputs: Outputs) -> dict[int, tuple[int, ...]]:
    return {r.sampling.seed: (*r.prompt_token_ids, *outputs[r.request_id]) for r in asked}


def run_checked(asked: list[Request], drafter, shape: EngineShape, runner: type = ModelRunner) -> Engine:
    """Run `asked` and hold tokens and logprobs to what they must be."""
    engine = build_engine(TARGET, drafter, shape, runner)
    outputs, logprobs = run(engine, asked)
    assert outputs == plain(asked)
    for request in asked:
        if request.sampling.logprobs is not None:
            check(request, outputs[request.request_id], logprobs[request.request_id])
    return engine


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("mode", MODES)
def test_every_emitted_token_has_the_targets_own_logprob(mode, sampling):
    asked = requests(sampling)
    drafter = None if mode == "off" else oracle(asked, plain(asked))
    stats = run_checked(asked, drafter, EngineShape(mode=mode)).stats()
    assert (stats.num_accepted > 0) == (mode != "off")


@pytest.mark.parametrize("mode", ["chain-3", "tree-16"])
def test_rejected_drafts_leave_no_trace(mode):
    asked = requests("seeded")
    drafter = AdversarialDrafter(texts(asked, plain(asked)))
    stats = run_checked(asked, drafter, EngineShape(mode=mode)).stats()
    assert stats.num_drafted > 0
    assert stats.num_accepted == 0


def test_drafts_that_are_drawn_give_logprobs_of_what_came():
    """The tokens need not be those of plain decoding, but their logprobs are those of the text they make."""
    asked = requests("seeded", max_tokens=60, temperature=1.5)
    shape = EngineShape(mode="tree-8", draft_mode="sampled")
    engine = build_engine(TARGET, build_drafter(shape, TARGET), shape)
    outputs, logprobs = run(engine, asked)
    assert engine.stats().num_accepted > 0
    for request in asked:
        check(request, outputs[request.request_id], logprobs[request.request_id])


def test_rows_that_ask_for_more_less_or_nothing_share_a_batch():
    counts = (0, None, 20, 1, None, 3)
    asked = [
        dataclasses.replace(
            r,
            sampling=dataclasses.replace(
                r.sampling, logprobs=None if count is None else WantedLogprobs(count)
            ),
        )
        for r, count in zip(requests("seeded", num=6), counts, strict=True)
    ]
    shape = EngineShape(mode="tree-16", max_num_seqs=3)  # slots change owners
    assert run_checked(asked, oracle(asked, plain(asked)), shape).stats().num_accepted > 0


def test_prefix_hits_and_chunks_change_no_logprob():
    asked = requests("greedy", num=4, shared=22)
    drafter = oracle(asked, plain(asked))
    shape = EngineShape(mode="chain-3", max_batched_tokens=13)
    engine = run_checked(asked, drafter, shape)
    outputs, logprobs = run(engine, asked)
    assert engine.stats().num_prefix_hit_tokens >= 4 * 20
    for request in asked:
        check(request, outputs[request.request_id], logprobs[request.request_id])


@pytest.mark.parametrize("block_size", [1, 4])
def test_preempted_rows_lose_and_repeat_no_logprob(block_size):
    asked = requests("seeded", num=6, max_tokens=24)
    shape = EngineShape(mode="tree-8", block_size=block_size, num_blocks=110 // block_size)
    stats = run_checked(asked, oracle(asked, plain(asked)), shape).stats()
    assert stats.num_preemptions > 0
    assert stats.num_accepted > 0


def test_trees_that_change_by_row_and_step_change_no_logprob():
    asked = requests("seeded", num=5)
    drafter = oracle(asked, plain(asked))
    stats = run_checked(asked, drafter, EngineShape(mode="tree-64"), ShufflingRunner).stats()
    assert stats.num_accepted > 0


def test_logprobs_end_with_the_stop_token_inside_an_accepted_path():
    (asked,) = requests("greedy", num=1)
    outputs = plain([asked])
    stop = outputs["r0"][4]
    length = outputs["r0"].index(stop) + 1
    stopped = dataclasses.replace(
        asked, sampling=dataclasses.replace(asked.sampling, stop_token_ids=(stop, EOS))
    )
    engine = build_engine(TARGET, oracle([asked], outputs, FIRST), EngineShape(mode="chain-7"))
    tokens, logprobs = run(engine, [stopped])
    assert tokens["r0"] == outputs["r0"][:length]
    check(stopped, tokens["r0"], logprobs["r0"])


def test_a_row_that_fails_has_no_logprobs():
    (asked,) = requests("greedy", num=1)
    target = build_target()
    target.lm_head.weight[:] = torch.nan
    engine = build_engine(target, None, EngineShape())
    engine.add(asked)
    deltas = [delta for _ in range(3) for delta in engine.step()]
    assert [(d.finish_reason, d.logprobs) for d in deltas] == [(FinishReason.ERROR, ())]


def run_scored(engine: Engine, asked: list[Request]) -> tuple[Outputs, Logprobs, Logprobs]:
    """Run requests that want their prompts scored; each prompt's scores come whole before any token."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
    logprobs: Logprobs = {request.request_id: [] for request in asked}
    scores: Logprobs = {request.request_id: [] for request in asked}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            if not delta.token_ids:
                assert tokens[delta.request_id] == []
                scores[delta.request_id] += delta.logprobs
                continue
            tokens[delta.request_id] += delta.token_ids
            logprobs[delta.request_id] += delta.logprobs
    return {name: tuple(ids) for name, ids in tokens.items()}, logprobs, scores


@pytest.mark.parametrize(
    "shape",
    [
        EngineShape(),
        EngineShape(mode="tree-8", max_batched_tokens=13),
        EngineShape(mode="chain-3", block_size=1, num_blocks=110),
        EngineShape(mode="chain-3", block_size=4, num_blocks=20, max_batched_tokens=16),
    ],
    ids=["plain", "chunks", "preemption", "preemption inside a prompt"],
)
def test_a_scored_prompt_gets_the_logprob_of_every_token_once(shape):
    asked = requests("seeded", num=6, shared=12, max_tokens=12)
    scored = [
        dataclasses.replace(
            r, sampling=dataclasses.replace(r.sampling, logprobs=WantedLogprobs(NUM_TOP, idx % 3 != 1))
        )
        for idx, r in enumerate(asked)
    ]
    drafter = None if shape.mode == "off" else oracle(asked, plain(asked))
    engine = build_engine(TARGET, drafter, shape)
    for _ in range(2):  # the second time all prompts are in the prefix cache
        outputs, logprobs, scores = run_scored(engine, scored)
        assert outputs == plain(asked)
        for request in scored:
            name, prompt = request.request_id, request.prompt_token_ids
            check(request, outputs[name], logprobs[name])
            if request.sampling.logprobs.scores_prompt:
                check(dataclasses.replace(request, prompt_token_ids=prompt[:1]), prompt[1:], scores[name])
            else:
                assert scores[name] == []
    assert (engine.stats().num_preemptions > 0) == (shape.num_blocks < 400)


def test_a_prompt_longer_than_a_piece_is_scored_whole():
    (prompt,) = prompts(1, length=150)
    asked = request_of("r", prompt, 1, max_tokens=1, logprobs=WantedLogprobs(0, True))
    engine = build_engine(TARGET, None, EngineShape())
    _, _, scores = run_scored(engine, [asked])
    check(dataclasses.replace(asked, prompt_token_ids=prompt[:1]), prompt[1:], scores["r"])


def test_a_prompt_of_one_token_has_nothing_to_score():
    asked = request_of("r", (7,), 1, max_tokens=3, logprobs=WantedLogprobs(2, True))
    outputs, logprobs, scores = run_scored(build_engine(TARGET, None, EngineShape()), [asked])
    check(asked, outputs["r"], logprobs["r"])
    assert scores["r"] == []


@pytest.mark.parametrize("count", [-1, 21, 1.0])
def test_a_bad_count_is_refused_by_name(count):
    with pytest.raises(RequestError) as caught:
        WantedLogprobs(count)
    assert caught.value.parameter == "logprobs"
