"""The engine of `serve_overhead`: all its own but the networks, which take a given time."""

import time

from app.bench_prompts import PASSAGE
from app.tokenizer import Tokenizer
from benchmarks import timed_core
from engine import Engine, EngineConfig, Request, SamplingParams
from engine import engine as engine_module
from tests.app.tiny_model import write_random_model


def test_an_engine_whose_networks_are_timed_says_the_passage_a_token_a_step(tmp_path, monkeypatch):
    write_random_model(tmp_path)
    seconds = 0.002
    worker = timed_core.build_timed(EngineConfig(tmp_path), [(64, seconds)])
    monkeypatch.setattr(engine_module, "build_worker", lambda config: worker)
    engine = Engine.load(EngineConfig(tmp_path))
    engine.add(Request("one", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)))
    said, started = [], time.perf_counter()
    while engine.has_work:
        for delta in engine.step():
            said += delta.token_ids
    text = Tokenizer(tmp_path).encode(PASSAGE, add_special_tokens=False)
    assert said == list(text[:20])
    assert time.perf_counter() - started >= seconds * 20
    assert engine.stats().num_calls == 20
