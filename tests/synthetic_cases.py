"""A model of a Llama's proportions that is small enough for a test, as the synthetic engine takes it."""

import dataclasses
from pathlib import Path

from engine.config import EngineConfig
from engine.runner.synthetic import shape_of

TINY = dataclasses.replace(
    shape_of("llama-3.1-8b"),
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    bos_token_id=1,
    eos_token_ids=(2,),
)


def engine_config(**changes: object) -> EngineConfig:
    """Return a small float32 engine on the CPU."""
    fields = {
        "model": Path("tiny"),
        "dtype": "float32",
        "device": "cpu",
        "num_blocks": 120,
        "block_size": 8,
        "max_num_seqs": 8,
        "max_batched_tokens": 512,
        "max_model_len": 256,
    }
    return EngineConfig(**(fields | changes))
