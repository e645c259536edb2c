"""The tiny target and a head for it as the folders that an engine loads.

Building them in memory is left to `tiny`.
"""

import json
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.draft.config import DraftConfig
from engine.draft.head import DraftHead
from engine.draft.loader import save_draft
from engine.weights.digest import folder_digest
from engine.weights.mapping import llama_mapping
from engine.weights.safetensors import write_safetensors
from tests.exactness.tiny import CONFIG, EOS, MAX_LEN, VOCAB, build_target


def write_target(folder: Path) -> None:
    """Write `build_target()` under the names of Hugging Face."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "rope_theta": CONFIG.rope_theta,
        "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": EOS,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mapping = llama_mapping(
        num_layers=CONFIG.num_layers,
        query_size=CONFIG.query_size,
        kv_size=CONFIG.kv_size,
        intermediate_size=CONFIG.intermediate_size,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
    )
    parameters = build_target().state_dict()
    tensors = {}
    for name, place in mapping.placements.items():
        rows = parameters[place.parameter]
        end = rows.shape[0] if place.num_rows is None else place.start + place.num_rows
        tensors[name] = rows[place.start : end].clone()
    write_safetensors(folder / "model.safetensors", tensors)


def write_draft(folder: Path, target: Path) -> None:
    """Write a random head for the target of `target`, often right: its feature is the target's last state."""
    config = DraftConfig(
        num_layers=1,
        hidden_size=CONFIG.hidden_size,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position=MAX_LEN,
        taps=(CONFIG.num_layers,),
        target_hidden_size=CONFIG.hidden_size,
        target_vocab_size=VOCAB,
        target_num_layers=CONFIG.num_layers,
        draft_vocab_size=VOCAB,
        is_feedback_normed=True,
        base_model_digest=folder_digest(target),
    )
    torch.manual_seed(1)
    head = DraftHead(config, num_positions=8, dtype=torch.float32)
    with torch.no_grad():
        head.fc.weight.copy_(torch.eye(CONFIG.hidden_size))
    save_draft(head, folder, {"made_by": "a test"})


def engine_config(model: Path, draft: Path | None = None, **changes: object) -> EngineConfig:
    """Return a small float32 engine over these folders."""
    fields = {
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "num_blocks": 100,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_batched_tokens": 256,
    }
    return EngineConfig(model=model, draft=draft, **(fields | changes))
