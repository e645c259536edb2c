"""JSON schemas through the engine: what share ends, parses and validates, and whether speculation still pays.

    python benchmarks/guided.py --model smollm2 --requests 300 --dtype float32 --repeats 1   # the same output
    python benchmarks/guided.py --model smollm2 --requests 300                               # the speed

Every request runs with and without speculation, in batches of --streams; in float32 the two must say the
same. Both follow the grammar, so the ratio is that of guided decoding alone. Half are greedy, half sampled.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jsonschema

from app.call import Message
from app.chat import ChatTemplate
from app.drafts import AUTO_DRAFT, draft_folder
from app.tokenizer import Tokenizer
from engine import Engine, EngineConfig, Grammar, Request, SamplingParams, resolve_model
from engine.config import DTypeName

Schema = dict[str, Any]
REPEATS = 3  # sides alternate, and each side's best time counts
MAX_TOKENS = 320


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
TOPICS = (
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
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request and the schema that its answer is judged by."""

    request: Request
    schema: Schema


@dataclass(frozen=True, slots=True)
class Run:
    """What all cases said, how they ended, and how long it took in all."""

    outputs: dict[str, tuple[int, ...]]
    ends: dict[str, str]
    seconds: float
    tokens_per_call: float


def make_cases(model: Path, num: int) -> list[Case]:
    tokenizer, template = Tokenizer(model), ChatTemplate(model)
    kinds = itertools.cycle(itertools.product(TOPICS, TASKS))
    cases = []
    for idx, (topic, (task, schema)) in zip(range(num), kinds, strict=False):
        question = f"{task} The topic is {topic}. Answer in JSON with this schema: {json.dumps(schema)}"
        prompt = tokenizer.encode(template.render([Message("user", question)]), add_special_tokens=False)
        sampling = SamplingParams(
            temperature=0.7 if idx % 2 else 0.0,
            seed=idx,
            max_tokens=MAX_TOKENS,
            grammar=Grammar("json_schema", json.dumps(schema)),
        )
        cases.append(Case(Request(str(idx), prompt, sampling), schema))
    return cases


def run(engine: Engine, cases: list[Case], mode: str, num_streams: int) -> Run:
    """Run the cases over trees of `mode`, `num_streams` at a time."""
    outputs: dict[str, tuple[int, ...]] = collections.defaultdict(tuple)
    ends: dict[str, str] = {}
    waiting = iter(cases)
    before = engine.stats()
    started = time.perf_counter()
    num_open = 0
    while num_open or engine.has_work or len(ends) < len(cases):
        for case in itertools.islice(waiting, num_streams - num_open):
            sampling = dataclasses.replace(case.request.sampling, speculation=mode)
            engine.add(dataclasses.replace(case.request, sampling=sampling))
            num_open += 1
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                ends[delta.request_id] = delta.message or str(delta.finish_reason)
                num_open -= 1
    after = engine.stats()
    num_tokens, num_calls = (
        after.num_output_tokens - before.num_output_tokens,
        after.num_calls - before.num_calls,
    )
    return Run(outputs, ends, time.perf_counter() - started, num_tokens / num_calls)


def judge(cases: list[Case], found: Run, tokenizer: Tokenizer) -> dict[str, int]:
    """Count the answers that ended by themselves, and those of them that parse and validate."""
    counts = collections.Counter(dict.fromkeys(("ended", "parsed", "validated"), 0))
    for case in cases:
        if (end := found.ends[case.request.request_id]) != "stop":
            print("not ended", case.request.request_id, end)
            continue
        counts["ended"] += 1
        try:
            answer = json.loads(tokenizer.decode(found.outputs[case.request.request_id]))
            counts["parsed"] += 1
            jsonschema.validate(answer, case.schema)
            counts["validated"] += 1
        except (ValueError, jsonschema.ValidationError) as error:
            print("fault", case.request.request_id, str(error).splitlines()[0])
    return dict(counts)


def measure(
    model: str, dtype: DTypeName, mode: str, num: int, num_streams: int, repeats: int
) -> dict[str, Any]:
    folder = resolve_model(model)
    engine = Engine.load(EngineConfig(model=folder, draft=draft_folder(model, AUTO_DRAFT), dtype=dtype))
    cases = make_cases(folder, num)
    run(engine, cases[: len(TASKS)], mode, num_streams)  # compiles the grammars
    best: dict[str, Run] = {}
    for _, side in itertools.product(range(repeats), ("off", mode)):
        found = run(engine, cases, side, num_streams)
        if side not in best or found.seconds < best[side].seconds:
            best[side] = found
    plain, speculative = best["off"], best[mode]
    num_tokens = sum(map(len, plain.outputs.values()))
    return {
        "model": engine.facts.model_name,
        "device": engine.facts.device,
        "dtype": engine.facts.dtype,
        "draft": engine.facts.draft_digest,
        "mode": mode,
        "num_streams": num_streams,
        "num_requests": num,
        "num_tokens": num_tokens,
        "num_equal": sum(plain.outputs[name] == speculative.outputs[name] for name in plain.outputs),
        "ends": dict(collections.Counter(plain.ends.values())),
        **judge(cases, speculative, Tokenizer(folder)),
        "tokens_per_call": speculative.tokens_per_call,
        "plain_tokens_per_s": num_tokens / plain.seconds,
        "speculative_tokens_per_s": num_tokens / speculative.seconds,
        "ratio": plain.seconds / speculative.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=get_args(DTypeName), default="auto")
    parser.add_argument("--mode", default="auto", help="a tree, or auto: the table of the device")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = measure(args.model, args.dtype, args.mode, args.requests, args.streams, args.repeats)
    for name, value in result.items():
        print(f"{name:28} {value:.3f}" if isinstance(value, float) else f"{name:28} {value}")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
