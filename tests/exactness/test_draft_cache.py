"""The draft's pages hold pairs of true features for every committed token, however the text came to be."""

import pytest
import torch

from engine.attention.registry import create_backend
from engine.draft.config import DraftConfig
from engine.draft.drafter import Drafter
from engine.draft.head import DraftHead
from engine.kvcache.kv_pool import KVPool
from engine.kvcache.tree_scratch import NodeScratch
from engine.model.llama import LlamaForCausalLM
from engine.request import FinishReason
from tests.exactness.tiny import (
    CONFIG,
    MAX_LEN,
    TAPS,
    VOCAB,
    EngineShape,
    build_engine,
    build_target,
    prompts,
    request_of,
    run,
    runner_shape,
)

TARGET = build_target()
DRAFT = DraftConfig(
    num_layers=2,
    hidden_size=CONFIG.hidden_size,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position=MAX_LEN,
    taps=TAPS,
    target_hidden_size=CONFIG.hidden_size,
    target_vocab_size=VOCAB,
    target_num_layers=CONFIG.num_layers,
    draft_vocab_size=40,
    is_feedback_normed=True,
)


def build_drafter(shape: EngineShape, target: LlamaForCausalLM = TARGET) -> Drafter:
    device = target.embed_tokens.weight.device
    torch.manual_seed(3)
    head = DraftHead(DRAFT, num_positions=MAX_LEN + 128, dtype=torch.float32).to(device)
    head.target_ids.copy_(torch.randperm(VOCAB)[: DRAFT.draft_vocab_size])
    head.requires_grad_(False).bind(target.embed_tokens.weight, target.head_weight)
    sizes = runner_shape(shape, shape.feature_window - 1)
    kv_shape = (2, 8, torch.float32, device)
    pool = KVPool(DRAFT.num_layers, sizes.num_blocks, shape.block_size, *kv_shape)
    scratch = NodeScratch(DRAFT.num_layers, shape.max_num_seqs, 65, *kv_shape)
    return Drafter(head, pool, scratch, create_backend("auto", device), shape.block_size)


def draft_keys(drafter: Drafter, num_positions: int) -> torch.Tensor:
    """Return the draft's keys of the first positions of the only sequence ever run, whose blocks rise from
    1.
    """
    return drafter.pool.k.flatten(1, 2)[:, drafter.pool.k.shape[2] :][:, :num_positions]


@pytest.mark.parametrize(
    ("mode", "window", "budget"),
    [
        ("chain-3", 16, 256),
        ("tree-16", 16, 256),
        ("chain-7", 8, 256),
        ("tree-8", 16, 11),
        ("chain-2", 16, 10),
    ],
)
def test_draft_keys_equal_a_fresh_prefill_of_the_same_text(mode, window, budget):
    (prompt,) = prompts(1, length=37)
    shape = EngineShape(
        mode=mode, feature_window=window, max_batched_tokens=budget, enable_prefix_cache=False
    )
    asked = request_of("r0", prompt, 100)
    drafter = build_drafter(shape)
    engine = build_engine(TARGET, drafter, shape)
    text = (*prompt, *run(engine, [asked])["r0"])
    assert engine.stats().num_drafted > 0

    fresh_shape = EngineShape(mode="off", enable_prefix_cache=False)
    fresh = build_drafter(fresh_shape)
    run(build_engine(TARGET, fresh, fresh_shape), [request_of("r0", text, 100, max_tokens=1)])
    # The last tokens were emitted by the last step, and never were a root.
    num_positions = len(text) - 8
    torch.testing.assert_close(
        draft_keys(drafter, num_positions), draft_keys(fresh, num_positions), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("mode", ["chain-1", "chain-5", "tree-8", "tree-64"])
@pytest.mark.parametrize("draft_mode", ["greedy", "sampled"])
def test_a_random_head_changes_no_token(mode, draft_mode):
    asked = [request_of(f"r{idx}", prompt, 100 + idx) for idx, prompt in enumerate(prompts(5))]
    plain_shape = EngineShape(mode="off")
    plain = run(build_engine(TARGET, None, plain_shape), asked)
    shape = EngineShape(mode=mode, draft_mode=draft_mode)
    engine = build_engine(TARGET, build_drafter(shape), shape)
    assert run(engine, asked) == plain
    assert engine.stats().num_drafted > 0


def test_off_rows_catch_up_within_the_window_and_forget_beyond_it():
    (prompt,) = prompts(1, length=20)
    shape = EngineShape(mode="chain-3", enable_prefix_cache=False, feature_window=8)
    drafter = build_drafter(shape)
    engine = build_engine(TARGET, drafter, shape)
    windows = []
    align = drafter._align

    def watch(window):
        windows.append((window.is_pending[0].sum().item(), window.prefix_start[0].item()))
        return align(window)

    drafter._align = watch
    chain, off = engine._dispatcher._otherwise, engine._scheduler._library.get("off")
    engine.add(request_of("r0", prompt, 100, max_tokens=60))
    outputs = []
    for step in range(40):
        # Plain for three steps, then for twelve: less and more than the window.
        engine._dispatcher._otherwise = off if 4 <= step < 7 or 12 <= step < 24 else chain
        outputs += [token for delta in engine.step() for token in delta.token_ids]
    plain = run(build_engine(TARGET, None, EngineShape()), [request_of("r0", prompt, 100, max_tokens=60)])[
        "r0"
    ]
    assert tuple(outputs) == plain[: len(outputs)]
    assert len(outputs) >= 38
    pending = [num for num, _ in windows[1:]]
    assert pending[4] in range(4, 8), "three plain steps and the root are filled in one pass"
    assert pending[9] == 8, "no more than the window is filled"
    starts = [start for _, start in windows]
    assert starts[9] == 0
    assert starts[10] > 20, "the hole is outside the window from then on"


@pytest.mark.parametrize("mode", ["off", "chain-3", "tree-8"])
def test_a_request_with_nan_logits_fails_alone_and_leaves_no_trace(mode):
    target = build_target()
    target.embed_tokens.weight[95] = torch.nan
    shape = EngineShape(mode=mode, num_blocks=60, enable_prefix_cache=True)
    healthy = [request_of(f"h{idx}", prompt, 100 + idx) for idx, prompt in enumerate(prompts(3))]
    healthy = [r for r in healthy if 95 not in r.prompt_token_ids]
    plain = run(build_engine(target, None, EngineShape()), healthy)
    engine = build_engine(target, build_drafter(shape), shape)
    poisoned = [request_of("root", (10, 11, 12, 95), 7), request_of("prompt", (95, *range(10, 30)), 8)]
    outputs: dict[str, list[int]] = {r.request_id: [] for r in (*poisoned, *healthy)}
    ends = {}
    for request in (*poisoned, *healthy):
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
            ends[delta.request_id] = delta.finish_reason
    assert ends["root"] is ends["prompt"] is FinishReason.ERROR
    assert {name: tuple(outputs[name]) for name in plain} == plain
    again = [request_of(f"a{r.request_id}", r.prompt_token_ids, r.sampling.seed) for r in healthy]
    assert list(run(engine, again).values()) == list(plain.values())
