"""The replica of a call: by what it knows of the prompt and by what it has to do."""

import dataclasses
import random

import pytest

from app.call import ChatCall, CompletionCall, Message, PromptShape, Tool
from app.protocol import parse_chat, parse_completion
from app.routing import BLOCK_BYTES, MOST_BLOCKS, Candidate, PrefixTable, prefix_keys, rank

OPTIONS = parse_completion(b'{"model": "m", "prompt": "x"}').options


def text_call(prompt: str | tuple[int, ...]) -> CompletionCall:
    return CompletionCall((prompt,), OPTIONS)


def chat(*contents: str, tools: tuple[Tool, ...] = ()) -> ChatCall:
    messages = tuple(Message("user", content) for content in contents)
    return ChatCall(messages, parse_chat(CHAT).options, PromptShape(tools=tools))


CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}'


@pytest.mark.parametrize(
    ("ongoing", "matched", "best"),
    [
        ((0, 0), {}, "a"),
        ((3, 1), {}, "b"),
        ((3, 1), {"a": 1.0}, "a"),  # 0.2 more load for a whole prompt
        ((7, 1), {"a": 1.0}, "b"),  # but not 0.6
        ((3, 1), {"a": 0.2}, "b"),
        ((3, 1), {"a": 1.0, "b": 0.8}, "b"),
    ],
)
def test_a_known_prompt_is_worth_some_load(ongoing, matched, best):
    candidates = [Candidate(name, num, 10) for name, num in zip("ab", ongoing, strict=True)]
    assert rank(candidates, matched)[0] == best


def test_a_replica_of_twice_the_capacity_gets_twice_the_calls():
    counts = {"small": 0, "large": 0}
    for _ in range(30):
        candidates = [Candidate("small", counts["small"], 10), Candidate("large", counts["large"], 20)]
        counts[rank(candidates, {})[0]] += 1
    assert abs(counts["large"] - 20) <= 1


def test_ranking_names_every_replica_once():
    rng = random.Random(0)
    candidates = [Candidate(str(idx), rng.random() * 20, rng.random() * 20) for idx in range(9)]
    assert sorted(rank(candidates, {"4": 1.0})) == sorted(c.name for c in candidates)


@pytest.mark.parametrize(
    "make", [text_call, lambda text: chat(text), lambda text: text_call(tuple(text.encode()))]
)
def test_prompts_share_the_keys_of_their_common_beginning(make):
    common = "abcd" * BLOCK_BYTES
    left, right = prefix_keys(make(common + "x" * 2000)), prefix_keys(make(common + "y" * 2000))
    num_shared = sum(a == b for a, b in zip(left, right, strict=True))
    assert num_shared >= 3
    assert left[:num_shared] == right[:num_shared]
    assert not set(left[num_shared:]) & set(right[num_shared:])


def test_a_block_is_named_by_all_before_it():
    block = "b" * BLOCK_BYTES
    left = prefix_keys(text_call("x" * BLOCK_BYTES + block))
    right = prefix_keys(text_call("y" * BLOCK_BYTES + block))
    assert left[1] != right[1]


def test_short_long_and_other_prompts_have_keys_of_their_own():
    assert len(prefix_keys(text_call("short"))) == 1
    assert prefix_keys(text_call("")) == ()
    assert len(prefix_keys(text_call("x" * BLOCK_BYTES * (MOST_BLOCKS + 5)))) == MOST_BLOCKS
    tool = Tool("now", "tells the time", {})
    assert prefix_keys(chat("x")) != prefix_keys(chat("x", tools=(tool,)))


@pytest.mark.parametrize("prompt", ["\ud800", (2**31,), (-(2**40),), (10**30, 5), ()])
def test_what_no_replica_would_take_has_keys_as_well(prompt):
    # It is for the replica to refuse: Serve's router would leave the call without an answer.
    assert len(prefix_keys(text_call(prompt))) == (1 if prompt else 0)


def test_a_table_tells_how_much_each_replica_saw():
    table, keys = PrefixTable(), [bytes([idx]) for idx in range(4)]
    table.observe(keys, "a")
    table.observe(keys[:2], "b")
    assert table.match(keys) == {"b": 0.5, "a": 1.0}
    assert table.match([b"other", *keys]) == {}
    assert table.match([]) == {}


def test_a_table_forgets_the_oldest():
    table = PrefixTable(most_keys=3)
    for idx in range(5):
        table.observe([bytes([idx])], "a")
    assert [bool(table.match([bytes([idx])])) for idx in range(5)] == [False, False, True, True, True]


def test_conversations_stay_with_their_replica_and_load_stays_even():
    """Eight conversations of many turns over four replicas: each goes on where it began."""
    table, homes = PrefixTable(), {}
    moved = 0
    texts = {idx: f"{idx} " * 2000 for idx in range(8)}
    for _ in range(10):
        ongoing = dict.fromkeys("abcd", 0)
        for idx in texts:
            texts[idx] += "more words of a turn " * 30
            keys = prefix_keys(text_call(texts[idx]))
            candidates = [Candidate(name, num, 16) for name, num in ongoing.items()]
            best = rank(candidates, table.match(keys))[0]
            moved += homes.setdefault(idx, best) != best
            table.observe(keys, best)
            ongoing[best] += 1
    assert moved == 0
    assert max(list(homes.values()).count(name) for name in "abcd") <= 3


def test_options_play_no_part():
    call = text_call("x" * 1000)
    other = dataclasses.replace(call, options=dataclasses.replace(OPTIONS, max_tokens=3))
    assert prefix_keys(call) == prefix_keys(other)
