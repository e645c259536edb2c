"""The engine's own duties: refusing, aborting, counting, and loading what a config names."""

import dataclasses
import logging

import pytest

from engine.config import SpeculationConfig
from engine.draft.loader import WEIGHTS
from engine.draft_status import DraftState
from engine.engine import Engine
from engine.errors import CapacityError, ConfigError, DraftMismatchError, ModelLoadError, RequestError
from engine.request import FinishReason, Request, SamplingParams
from engine.runner.slot_state import SlotState
from tests.exactness.folder import engine_config, write_draft, write_target
from tests.exactness.oracle import FIRST, AdversarialDrafter, OracleDrafter
from tests.exactness.tiny import EOS, VOCAB, EngineShape, build_engine, build_target, prompts, request_of, run

TARGET = build_target()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of the tiny target and of a head for it."""
    root = tmp_path_factory.mktemp("models")
    write_target(root / "target")
    write_draft(root / "draft", root / "target")
    return root / "target", root / "draft"


def asked_of(num: int, **sampling):
    return [request_of(f"r{idx}", prompt, 100 + idx, **sampling) for idx, prompt in enumerate(prompts(num))]


def plain(asked):
    return {
        name: text
        for r in asked
        for name, text in run(build_engine(TARGET, None, EngineShape()), [r]).items()
    }


@pytest.mark.parametrize("mode", ["off", "chain-3", "tree-16"])
def test_a_loaded_engine_emits_what_the_networks_in_memory_do(folders, mode):
    target, draft = folders
    asked = asked_of(3)
    config = engine_config(target, draft, speculation=SpeculationConfig(mode=mode))
    engine = Engine.load(config)
    assert run(engine, asked) == plain(asked)
    assert (engine.stats().num_accepted > 0) == (mode != "off")


def test_without_a_draft_auto_decodes_plainly_and_a_tree_is_refused(folders):
    engine = Engine.load(engine_config(folders[0]))
    asked = asked_of(2)
    assert run(engine, asked) == plain(asked)
    assert engine.stats().steps_by_tree[0][0] == "off"
    with pytest.raises(RequestError, match="chain-2") as refusal:
        engine.add(request_of("tree", (7,), 1, speculation="chain-2"))
    assert refusal.value.parameter == "speculation"


def test_a_draft_whose_weights_changed_is_refused(folders, tmp_path):
    write_draft(tmp_path, folders[0])
    weights = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(ModelLoadError, match="sha256"):
        Engine.load(engine_config(folders[0], tmp_path))


def test_a_draft_of_other_target_weights_is_refused(folders, tmp_path):
    write_target(tmp_path / "other")
    config = (tmp_path / "other" / "config.json").read_text()
    (tmp_path / "other" / "config.json").write_text(config.replace("10000.0", "20000.0"))
    with pytest.raises(DraftMismatchError, match="choose a draft"):
        Engine.load(engine_config(tmp_path / "other", folders[1]))


@pytest.mark.parametrize(
    "speculation", [SpeculationConfig(mode="tree-9"), SpeculationConfig(table=((4, "chain-99"),))]
)
def test_a_tree_that_does_not_exist_stops_the_start(folders, speculation):
    with pytest.raises(ConfigError, match="no tree is called"):
        Engine.load(engine_config(*folders, speculation=speculation))


@pytest.mark.parametrize(
    ("prompt", "sampling", "parameter"),
    [
        ((1, VOCAB), {}, "prompt"),
        ((-1, 3), {}, "prompt"),
        ((7,) * 256, {}, "prompt"),
        ((7,), {"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ((7,), {"stop_token_ids": (VOCAB,), "min_tokens": 2}, "stop_token_ids"),
        ((7,), {"stop_token_ids": (3, -1)}, "stop_token_ids"),
        ((7, 8.0), {}, "prompt"),
        ((7, "8"), {}, "prompt"),
        ((7,), {"stop_token_ids": (8.5,)}, "stop_token_ids"),
        ((7,), {"logit_bias": ((8.5, 1.0),)}, "logit_bias"),
        ((7,), {"speculation": "tree-7"}, "speculation"),
        ((7,) * 100, {"max_tokens": 100}, "max_tokens"),
    ],
)
def test_what_can_never_run_is_refused_by_the_field_to_change(prompt, sampling, parameter):
    engine = build_engine(TARGET, None, EngineShape(num_blocks=40))
    with pytest.raises(RequestError) as refusal:
        engine.add(request_of("r", prompt, 1, **sampling))
    assert refusal.value.parameter == parameter
    assert not engine.has_work
    assert engine.stats().num_prompt_tokens == 0


@pytest.mark.parametrize("field", ["top_k", "min_tokens"])
def test_counts_that_no_device_integer_holds_are_refused(field):
    SamplingParams(**{"max_tokens": 2**63, field: 2**31 - 1})
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{"max_tokens": 2**63, field: 2**63})
    assert refusal.value.parameter == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_k", 2.0), ("max_tokens", float("inf")), ("max_tokens", 16.5), ("min_tokens", 1.5), ("seed", 0.5)],
)
def test_what_no_device_integer_is_made_of_is_refused(field, value):
    with pytest.raises(RequestError, match="integer") as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.parameter == field


def test_a_priority_that_cannot_be_ordered_is_refused():
    with pytest.raises(RequestError, match="integer") as refusal:
        Request("r", (7,), SamplingParams(), priority=float("nan"))
    assert refusal.value.parameter == "priority"


@pytest.mark.parametrize(
    ("num_eos", "num_stops", "sampling", "is_refused"),
    [
        (8, 56, {"min_tokens": 2, "ignore_eos": False}, False),
        (9, 56, {"min_tokens": 2, "ignore_eos": False}, True),
        (9, 56, {"min_tokens": 2}, False),
        (9, 56, {"ignore_eos": False}, False),
        (80, 0, {"min_tokens": 2, "ignore_eos": False}, True),
    ],
)
def test_more_stops_to_hold_back_than_a_row_holds_are_refused(num_eos, num_stops, sampling, is_refused):
    engine = build_engine(TARGET, None, EngineShape())
    eos = tuple(range(VOCAB - num_eos, VOCAB))
    engine.facts = dataclasses.replace(engine.facts, eos_token_ids=eos)
    engine._runner._eos_token_ids = eos
    asked = request_of("r", (7,), 1, max_tokens=5, stop_token_ids=tuple(range(num_stops)), **sampling)
    if is_refused:
        with pytest.raises(RequestError, match=f"at most 64 stop tokens, found {num_eos + num_stops}"):
            engine.add(asked)
        assert not engine.has_work
    else:
        assert len(run(engine, [asked])["r"]) <= 5


def failing_admissions(monkeypatch, seeds):
    """Let the admissions of these seeds raise half-way, as a bug in one of their fields would."""
    admit = SlotState._admit_vocabulary

    def admit_or_raise(self, admission, eos_token_ids):
        if admission.seed in seeds:
            raise IndexError("the tensor is too small")
        admit(self, admission, eos_token_ids)

    monkeypatch.setattr(SlotState, "_admit_vocabulary", admit_or_raise)


@pytest.mark.parametrize("mode", ["off", "chain-3"])
@pytest.mark.parametrize("failing", [{100}, {102}, {101, 103}, {100, 101, 102, 103, 104}])
def test_an_admission_that_raises_fails_its_request_alone(monkeypatch, caplog, mode, failing):
    asked = asked_of(5)
    expected = plain(asked)
    texts = {r.sampling.seed: (*r.prompt_token_ids, *expected[r.request_id]) for r in asked}
    failing_admissions(monkeypatch, failing)
    shape = EngineShape(mode=mode, max_num_seqs=2, num_blocks=60)
    engine = build_engine(TARGET, OracleDrafter(texts, FIRST), shape)
    for request in asked:
        engine.add(request)
    outputs, ends = {r.request_id: [] for r in asked}, {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.request_id not in ends
            outputs[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                ends[delta.request_id] = delta
    for request in asked:
        name = request.request_id
        has_failed = request.sampling.seed in failing
        assert ends[name].finish_reason is (FinishReason.ERROR if has_failed else FinishReason.LENGTH)
        assert (ends[name].message == "the engine could not start this request") == has_failed
        assert tuple(outputs[name]) == (() if has_failed else expected[name])
    stats = engine.stats()
    assert (stats.num_failed, stats.num_finished) == (len(failing), 5 - len(failing))
    assert stats.num_held_blocks == 0
    assert caplog.text.count("admission failed") == len(failing)
    monkeypatch.undo()
    assert run(engine, asked) == expected, "every slot is good again"


def test_the_largest_counts_are_served():
    asked = [request_of("r0", prompts(1)[0], 100, top_k=2**31 - 1, temperature=0.8, max_tokens=9)]
    engine = build_engine(TARGET, None, EngineShape())
    assert len(run(engine, asked)["r0"]) == 9
    huge = request_of("r1", prompts(1)[0], 1, max_tokens=2**63, min_tokens=2**31 - 1, ignore_eos=False)
    assert len(run(engine, [huge])["r1"]) == 256 - 9


def test_a_name_in_use_and_a_full_queue_are_refused():
    shape = EngineShape(max_num_seqs=1, max_num_waiting=2)
    engine = build_engine(TARGET, None, shape)
    first, second, third = asked_of(3)
    engine.add(first)
    with pytest.raises(RequestError, match="in use"):
        engine.add(first)
    engine.add(second)
    with pytest.raises(CapacityError):
        engine.add(third)
    engine.step()  # the first leaves the queue
    engine.add(third)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_abort_frees_all_at_once_and_changes_no_neighbour(num_steps):
    asked = asked_of(3)
    texts = {r.sampling.seed: (*r.prompt_token_ids, *plain(asked)[r.request_id]) for r in asked}
    engine = build_engine(TARGET, OracleDrafter(texts, FIRST), EngineShape(mode="chain-2"))
    outputs = {r.request_id: [] for r in asked}
    for request in asked:
        engine.add(request)

    def step():
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids

    for _ in range(num_steps):
        step()
    held = engine.stats().num_held_blocks
    assert engine.abort("r1")
    assert not engine.abort("r1")
    assert not engine.abort("nobody")
    assert engine.stats().num_held_blocks < held or num_steps == 0
    num_kept = len(outputs["r1"])
    while engine.has_work:
        step()
    assert len(outputs.pop("r1")) == num_kept, "nothing comes after an abort"
    assert {name: tuple(tokens) for name, tokens in outputs.items()} == {
        name: text for name, text in plain(asked).items() if name != "r1"
    }
    stats = engine.stats()
    assert (stats.num_held_blocks, stats.num_aborted, stats.num_finished) == (0, 1, 2)


def test_the_counters_add_up():
    asked = asked_of(4, max_tokens=17)
    texts = {r.sampling.seed: (*r.prompt_token_ids, *plain(asked)[r.request_id]) for r in asked}
    engine = build_engine(TARGET, OracleDrafter(texts, FIRST), EngineShape(mode="chain-3"))
    deltas = []
    for request in asked:
        engine.add(request)
    while engine.has_work:
        deltas += engine.step()
    stats = engine.stats()
    assert stats.num_output_tokens == sum(len(delta.token_ids) for delta in deltas) == 4 * 17
    assert stats.num_calls == len(deltas)
    assert stats.num_accepted == sum(delta.num_accepted_in_step for delta in deltas)
    assert sum(stats.accepted_by_depth) == stats.num_accepted
    assert stats.num_prompt_tokens == sum(len(r.prompt_token_ids) for r in asked)
    last = {delta.request_id: delta for delta in deltas}
    assert all(delta.finish_reason is FinishReason.LENGTH for delta in last.values())
    assert sum(delta.num_calls for delta in last.values()) == stats.num_calls
    assert sum(delta.num_accepted for delta in last.values()) == stats.num_accepted
    assert stats.num_drafted >= sum(delta.num_drafted for delta in last.values())
    assert stats.num_drafted == 3 * stats.num_drafts
    assert stats.num_drafts == dict(stats.steps_by_tree)["chain-3"] >= stats.num_calls
    assert (stats.num_finished, stats.num_running, stats.num_waiting) == (4, 0, 0)


@pytest.mark.parametrize(("num_requests", "tree"), [(1, "tree-8"), (3, "chain-2"), (6, "off")])
def test_a_burst_on_an_idle_engine_gets_the_tree_of_its_size(num_requests, tree):
    asked = asked_of(num_requests)
    texts = {r.sampling.seed: (*r.prompt_token_ids, *plain(asked)[r.request_id]) for r in asked}
    shape = EngineShape(mode="auto", table=((1, "tree-8"), (4, "chain-2")))
    engine = build_engine(TARGET, OracleDrafter(texts, FIRST), shape)
    for request in asked:
        engine.add(request)
    engine.step()
    engine.step()
    assert set(dict(engine.stats().steps_by_tree)) == {tree}


def test_plain_rows_draft_nothing():
    asked = [request_of("off", (10, 11), 100, speculation="off"), request_of("tree", (10, 11), 100)]
    text = (10, 11, *plain(asked[:1])["off"])
    engine = build_engine(TARGET, OracleDrafter({100: text}, FIRST), EngineShape(mode="chain-3"))
    run(engine, asked)
    stats = engine.stats()
    rows = dict(stats.steps_by_tree)
    assert rows["off"] >= 24
    assert stats.num_drafts == rows["chain-3"] > 0


@pytest.mark.parametrize("is_finished", [False, True])
def test_an_abort_counts_the_prefix_it_hit_and_how_the_client_ended(is_finished):
    engine = build_engine(TARGET, None, EngineShape(block_size=4))
    prompt = tuple(range(10, 19))
    run(engine, [request_of("first", prompt, 1)])
    assert engine.stats().num_prefix_hit_tokens == 0
    engine.add(request_of("second", prompt, 1))
    engine.step()
    engine.add(request_of("waiting", prompt, 1))
    assert engine.abort("second", is_finished)
    assert engine.abort("waiting", is_finished)
    stats = engine.stats()
    assert stats.num_prefix_hit_tokens == 8, "the one that waited hit nothing"
    assert (stats.num_finished, stats.num_aborted) == ((3, 0) if is_finished else (1, 2))


def test_a_stop_token_inside_a_path_ends_the_answer_there():
    (free,) = asked_of(1)
    text = plain([free])["r0"]
    idx = next(idx for idx in range(6, len(text)) if text[idx] not in text[:idx])
    asked = request_of("r0", free.prompt_token_ids, 100, stop_token_ids=(text[idx],))
    texts = {100: (*free.prompt_token_ids, *text)}
    engine = build_engine(TARGET, OracleDrafter(texts, FIRST), EngineShape(mode="chain-7"))
    engine.add(asked)
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert tuple(token for delta in deltas for token in delta.token_ids) == text[: idx + 1]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].num_accepted_in_step == len(deltas[-1].token_ids), "the stop was a draft"


def test_requests_without_a_seed_draw_differently_and_repeat_with_the_engine():
    def outputs():
        engine = build_engine(TARGET, None, EngineShape(enable_prefix_cache=False))
        asked = [request_of(f"r{idx}", (10, 11, 12), None, temperature=1.0) for idx in range(3)]
        return run(engine, asked)

    first = outputs()
    assert len(set(first.values())) == 3
    assert outputs() == first


def test_a_draft_that_is_never_right_is_given_up_and_reported_once(caplog):
    asked = asked_of(8, max_tokens=90)
    expected = plain(asked)
    texts = {r.sampling.seed: (*r.prompt_token_ids, *expected[r.request_id]) for r in asked}
    engine = build_engine(TARGET, AdversarialDrafter(texts), EngineShape(mode="tree-8"))
    with caplog.at_level(logging.WARNING, "engine"):
        assert run(engine, asked) == expected
    status = engine.stats().draft
    assert (status.state, status.is_off) == (DraftState.COLLAPSED, True)
    assert 500 <= status.num_drafts < 520, "plain from the verdict on"
    assert dict(engine.stats().steps_by_tree)["off"] > 150
    assert [record.message.split(" digest=")[0] for record in caplog.records] == ["speculation off"]


def test_a_request_ends_at_the_models_own_stop_unless_it_ignores_it():
    (prompt,) = prompts(1)
    biased = {"logit_bias": ((EOS, 50.0),)}
    engine = build_engine(TARGET, None, EngineShape())
    assert run(engine, [request_of("r0", prompt, 1, ignore_eos=False, **biased)])["r0"] == (EOS,)
    assert run(engine, [request_of("r1", prompt, 1, max_tokens=5, **biased)])["r1"] == (EOS,) * 5
