"""Which stored tensor fills which rows of which parameter.

Reading tensors is left to `shards`, copying them to `loader`; the networks name their own parameters.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """A stored tensor fills rows [start, start + num_rows) of `parameter`; all its rows where `num_rows` is
    None.
    """

    parameter: str
    start: int = 0
    num_rows: int | None = None


@dataclass(frozen=True, slots=True)
class WeightMapping:
    """Every tensor a checkpoint must hold, by its stored name, and the ones it may hold besides.

    `ignored` lists endings of names whose tensors are left unread.
    """

    placements: Mapping[str, Placement]
    ignored: tuple[str, ...] = ()


def llama_mapping(
    *,
    num_layers: int,
    query_size: int,
    kv_size: int,
    intermediate_size: int,
    tie_word_embeddings: bool,
    attention_bias: bool,
    mlp_bias: bool,
) -> WeightMapping:
    """Return the mapping of a `LlamaForCausalLM` checkpoint onto fused projections.

    `qkv_proj` stacks the rows of q, k and v: [(Hq + 2 Hkv) * D, hidden]; `gate_up_proj` those of gate and up:
    [2 I, hidden]. A tied checkpoint may hold an `lm_head.weight`; it is not read.
    """
    placements = {
        "model.embed_tokens.weight": Placement("embed_tokens.weight"),
        "model.norm.weight": Placement("norm.weight"),
    }
    # Tables that old checkpoints saved; they are computed from the config.
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    if tie_word_embeddings:
        ignored = (*ignored, "lm_head.weight")
    else:
        placements["lm_head.weight"] = Placement("lm_head.weight")
    attention = _stack("qkv_proj", {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size})
    attention["o_proj"] = Placement("o_proj")
    mlp = _stack("gate_up_proj", {"gate_proj": intermediate_size, "up_proj": intermediate_size})
    mlp["down_proj"] = Placement("down_proj")
    for layer_idx in range(num_layers):
        stored, ours = f"model.layers.{layer_idx}", f"layers.{layer_idx}"
        placements[f"{stored}.input_layernorm.weight"] = Placement(f"{ours}.input_norm.weight")
        placements[f"{stored}.post_attention_layernorm.weight"] = Placement(
            f"{ours}.post_attention_norm.weight"
        )
        for block, parts, has_bias in (("self_attn", attention, attention_bias), ("mlp", mlp, mlp_bias)):
            for kind in ("weight", "bias") if has_bias else ("weight",):
                for part, place in parts.items():
                    placements[f"{stored}.{block}.{part}.{kind}"] = Placement(
                        f"{ours}.{place.parameter}.{kind}", place.start, place.num_rows
                    )
    return WeightMapping(placements, ignored)


def _stack(parameter: str, num_rows: Mapping[str, int]) -> dict[str, Placement]:
    """Place parts one below the other in `parameter`, in the given order."""
    starts = itertools.accumulate(num_rows.values(), initial=0)
    return {
        part: Placement(parameter, start, rows)
        for (part, rows), start in zip(num_rows.items(), starts, strict=False)
    }


def identity_mapping(names: Iterable[str]) -> WeightMapping:
    """Return the mapping of a checkpoint whose tensors bear the names of the module's own parameters."""
    return WeightMapping({name: Placement(name) for name in names})
