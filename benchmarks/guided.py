"""JSON schemas through the engine: what share ends, parses and validates, and whether speculation still pays.

    python benchmarks/guided.py --dtype float32     # the same output
    python benchmarks/guided.py                     # the speed, as `eyas serve` runs

Every request runs with and without speculation, in groups of --streams, the sides taking turns; in float32
the two must say the same. Both follow the grammar, so the ratio is that of guided decoding alone. Half are
greedy, half sampled. The exit status is 1 where a limit printed under `holds` is not met.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jsonschema
from tqdm import tqdm

from app.call import Message
from app.chat import ChatTemplate
from app.drafts import AUTO_DRAFT, draft_folder
from app.intervals import ratio_interval
from app.tokenizer import Tokenizer
from engine import Engine, EngineConfig, Grammar, Request, SamplingParams, resolve_model
from engine.config import DTypeName

Schema = dict[str, Any]
MAX_TOKENS = 320
MIN_ENDED, MIN_RATIO = 0.8, 1.2


def text(longest: int = 60) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": longest}


def record(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_PERSON = record(name=text(30), age={"type": "integer", "minimum": 0, "maximum": 120})
# What is asked for, and its schema.
TASKS: tuple[tuple[str, Schema], ...] = (
    ("Describe a person.", _PERSON),
    ("Describe a company and its founder.", record(company=text(30), founder=_PERSON, city=text(30))),
    (
        "Judge a film.",
        record(
            title=text(),
            verdict={"enum": ["good", "fair", "bad"]},
            stars={"type": "integer", "minimum": 1, "maximum": 5},
        ),
    ),
    (
        "Write a shopping list.",
        record(
            items={
                "type": "array",
                "items": record(name=text(20), count={"type": "integer", "minimum": 1, "maximum": 20}),
                "minItems": 1,
                "maxItems": 4,
            }
        ),
    ),
    (
        "Register a part.",
        record(
            code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            color={"enum": ["rot", "grün", "weiß"]},
            is_sold={"type": "boolean"},
        ),
    ),
    (
        "Plan a meeting.",
        record(
            day={"type": "string", "format": "date"},
            time={"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
            guests={"type": "array", "items": text(20), "minItems": 1, "maxItems": 3},
        ),
    ),
    (
        "Say hello in three languages.",
        {
            "type": "array",
            "items": record(language={"enum": ["日本語", "Français", "Ελληνικά"]}, greeting=text(20)),
            "minItems": 3,
            "maxItems": 3,
        },
    ),
    (
        "Describe a family tree.",
        {
            "$ref": "#/$defs/person",
            "$defs": {
                "person": record(
                    name=text(20),
                    children={"type": "array", "items": {"$ref": "#/$defs/person"}, "maxItems": 2},
                )
            },
        },
    ),
    (
        "Answer with a number or a reason for having none.",
        {"anyOf": [record(number={"type": "number", "minimum": 0, "maximum": 1000}), record(reason=text())]},
    ),
    (
        "Give a recipe.",
        record(
            dish=text(30),
            minutes={"type": "integer", "minimum": 1, "maximum": 240},
            steps={"type": "array", "items": text(50), "minItems": 1, "maxItems": 3},
            rating={"type": ["number", "null"]},
        ),
    ),
)
# With the tasks 300 different prompts.
TOPICS = (
    *(
        "the sea",
        "a garden",
        "music",
        "old machines",
        "winter",
        "a market",
        "space",
        "birds",
        "bread",
        "maps",
    ),
    *(
        "a school",
        "rain",
        "trains",
        "honey",
        "a castle",
        "the desert",
        "chess",
        "glass",
        "horses",
        "a harbor",
    ),
    *("letters", "tea", "bridges", "the moon", "a farm", "shoes", "a festival", "rivers", "paint", "clocks"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request and the schema that its answer is judged by."""

    request: Request
    schema: Schema


@dataclass(frozen=True, slots=True)
class Run:
    """What a group said on one side, how it ended, and how long it took: in all, and from the first token
    on.
    """

    outputs: dict[str, tuple[int, ...]]
    ends: dict[str, str]
    seconds: float
    decode_seconds: float
    num_calls: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs.values()))


Pair = tuple[Run, Run]  # a group without and with speculation


def make_cases(model: Path, num: int) -> list[Case]:
    tokenizer, template = Tokenizer(model), ChatTemplate(model)
    kinds = itertools.cycle(itertools.product(enumerate(TOPICS), enumerate(TASKS)))
    cases = []
    for idx, ((topic_idx, topic), (task_idx, (task, schema))) in zip(range(num), kinds, strict=False):
        question = f"{task} The topic is {topic}. Answer in JSON with this schema: {json.dumps(schema)}"
        prompt = tokenizer.encode(template.render([Message("user", question)]), add_special_tokens=False)
        sampling = SamplingParams(
            temperature=0.7 if (topic_idx + task_idx) % 2 else 0.0,  # so that every schema has both
            seed=idx,
            max_tokens=MAX_TOKENS,
            grammar=Grammar("json_schema", json.dumps(schema)),
        )
        cases.append(Case(Request(str(idx), prompt, sampling), schema))
    return cases


def run(engine: Engine, group: Sequence[Case], mode: str, max_tokens: int = MAX_TOKENS) -> Run:
    """Run a group over trees of `mode` to its end."""
    outputs: dict[str, tuple[int, ...]] = collections.defaultdict(tuple)
    ends: dict[str, str] = {}
    num_calls = engine.stats().num_calls
    started, first = time.perf_counter(), 0.0
    for case in group:
        sampling = dataclasses.replace(case.request.sampling, speculation=mode, max_tokens=max_tokens)
        engine.add(dataclasses.replace(case.request, sampling=sampling))
    while engine.has_work:
        for delta in engine.step():
            first = first or time.perf_counter()
            outputs[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                ends[delta.request_id] = delta.message or str(delta.finish_reason)
    ended = time.perf_counter()
    return Run(outputs, ends, ended - started, ended - first, engine.stats().num_calls - num_calls)


def judge(cases: Sequence[Case], pairs: Sequence[Pair], tokenizer: Tokenizer) -> dict[str, int]:
    """Count the answers of both sides that ended by themselves, and those of them that parse and validate."""
    counts = collections.Counter(dict.fromkeys(("ended", "parsed", "validated"), 0))
    schemas = {case.request.request_id: case.schema for case in cases}
    for found in itertools.chain(*pairs):
        for name, end in found.ends.items():
            if end != "stop":
                print("not ended", name, end)
                continue
            counts["ended"] += 1
            try:
                answer = json.loads(tokenizer.decode(found.outputs[name]))
                counts["parsed"] += 1
                jsonschema.validate(answer, schemas[name])
                counts["validated"] += 1
            except (ValueError, jsonschema.ValidationError) as error:
                print("fault", name, str(error).splitlines()[0])
    return dict(counts)


def time_pairs(pairs: Sequence[Pair], seconds: Callable[[Run], float]) -> dict[str, Any]:
    """Return tokens per second of both sides and their ratio with its interval over the groups.

    Where the sides say different texts, each group's plain time is scaled to the tokens of the other side.
    """
    scaled = [
        (seconds(plain) * speculative.num_tokens / plain.num_tokens, seconds(speculative))
        for plain, speculative in pairs
    ]
    ratio, low, high = ratio_interval(scaled)
    rates = [
        sum(run.num_tokens for run in side) / sum(map(seconds, side)) for side in zip(*pairs, strict=True)
    ]
    return {
        "plain_tokens_per_s": rates[0],
        "speculative_tokens_per_s": rates[1],
        "ratio": ratio,
        "interval": (low, high),
    }


def measure(model: str, dtype: DTypeName, mode: str, num: int, num_streams: int) -> dict[str, Any]:
    folder = resolve_model(model)
    # Without a prefix cache: the side that runs second would find the prompts of the first in it.
    config = EngineConfig(
        model=folder, draft=draft_folder(model, AUTO_DRAFT), dtype=dtype, enable_prefix_cache=False
    )
    engine = Engine.load(config)
    cases = make_cases(folder, num)
    for case in cases[: len(TASKS)]:  # compiles the grammars
        run(engine, [case], mode, max_tokens=8)
    pairs: list[Pair] = []
    for idx, start in enumerate(tqdm(range(0, num, num_streams), disable=None)):
        group = cases[start : start + num_streams]
        sides = {side: run(engine, group, side) for side in (("off", mode), (mode, "off"))[idx % 2]}
        pairs.append((sides["off"], sides[mode]))
    outputs = [
        {name: ids for found in side for name, ids in found.outputs.items()}
        for side in zip(*pairs, strict=True)
    ]
    counts = judge(cases, pairs, Tokenizer(folder))
    timed = time_pairs(pairs, lambda run: run.seconds)
    num_equal = sum(outputs[0][name] == outputs[1][name] for name in outputs[0])
    holds = {
        f"at least {MIN_ENDED:.0%} end by themselves": counts["ended"] >= MIN_ENDED * 2 * num,
        "all that end parse and validate": counts["validated"] == counts["ended"],
        f"ratio of at least {MIN_RATIO}": timed["ratio"] >= MIN_RATIO,
    }
    if engine.facts.dtype == "float32":
        holds["same output with and without speculation"] = num_equal == num
    speculative = [found for _, found in pairs]
    return {
        "model": engine.facts.model_name,
        "device": engine.facts.device,
        "dtype": engine.facts.dtype,
        "draft": engine.facts.draft_digest,
        "mode": mode,
        "num_streams": num_streams,
        "num_requests": num,
        "num_answers": 2 * num,
        **counts,
        "num_equal": num_equal,
        "tokens_per_call": sum(run.num_tokens for run in speculative)
        / sum(run.num_calls for run in speculative),
        "with_prompts": timed,
        "from_first_token": time_pairs(pairs, lambda run: run.decode_seconds),
        "holds": holds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=get_args(DTypeName), default="auto")
    parser.add_argument("--mode", default="auto", help="a tree, or auto: the table of the device")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = measure(args.model, args.dtype, args.mode, args.requests, args.streams)
    for name, value in result.items():
        print(f"{name:20} {value:.3f}" if isinstance(value, float) else f"{name:20} {value}")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(result["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
