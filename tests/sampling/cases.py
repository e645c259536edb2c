"""Sampling tensors from plain values, batches to verify, and plain references for truncation.

What is tested is left to the test files.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.speculation import DraftOutput, SamplingTensors, TreeTensors
from engine.tree.topology import TreeTopology, chain, root_only

Values = float | Sequence[float]
WIDE = TreeTopology("wide", (-1, 0, 0, 0, 1, 1, 3, 3, 6, 7, 7))


def sampling_tensors(
    num_rows: int,
    vocab_size: int,
    *,
    temperature: Values = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: Values = 1.0,
    min_p: Values = 0.0,
    repetition_penalty: Values = 1.0,
    presence_penalty: Values = 0.0,
    frequency_penalty: Values = 0.0,
    seed: int | Tensor = 0,
    bias: tuple[tuple[int, float], ...] = (),
    prompt: Tensor | None = None,
    stop_token_ids: tuple[int, ...] = (),
    stop_from: int | Sequence[int] = 0,
) -> SamplingTensors:
    """Build the tensors of `num_rows` rows; a single value is every row's."""

    def floats(values: Values) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32).expand(num_rows).clone()

    def ints(values: int | Sequence[int] | Tensor) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).expand(num_rows).clone()

    k = ints(top_k)
    fields = {
        "temperature": floats(temperature),
        "top_p": floats(top_p),
        "min_p": floats(min_p),
        "repetition_penalty": floats(repetition_penalty),
        "presence_penalty": floats(presence_penalty),
        "frequency_penalty": floats(frequency_penalty),
    }
    is_penalized = bool(
        (fields["repetition_penalty"] != 1).any()
        or (fields["presence_penalty"] != 0).any()
        or (fields["frequency_penalty"] != 0).any()
    )
    width = vocab_size if is_penalized else 0
    return SamplingTensors(
        **fields,
        top_k=torch.where(k > 0, k, vocab_size),
        seed=ints(seed),
        bias_token_ids=torch.tensor([[token for token, _ in bias]] * num_rows, dtype=torch.int64),
        bias_values=torch.tensor([[value for _, value in bias]] * num_rows, dtype=torch.float32),
        prompt_mask=torch.zeros(num_rows, width, dtype=torch.bool) if prompt is None else prompt,
        output_counts=torch.zeros(num_rows, width, dtype=torch.int32),
        stop_token_ids=torch.tensor([stop_token_ids] * num_rows, dtype=torch.int64),
        stop_from=ints(stop_from),
        is_sampled=bool((fields["temperature"] > 0).any()),
        is_truncated=bool((k > 0).any() or (fields["top_p"] < 1).any() or (fields["min_p"] > 0).any()),
        is_penalized=is_penalized,
        is_biased=bool(bias),
        has_min_tokens=bool(stop_token_ids),
    )


def sorted_truncation(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return [V] bool: top-k, then top-p of what is left, then min-p, of one row [V], by a stable sort."""
    order = logits.double().sort(descending=True, stable=True).indices
    ranked = logits.double()[order]
    mass = ((ranked - ranked[0]) / temperature).exp()
    kept = mass >= min_p
    if top_k:
        kept[top_k:] = False
        mass[top_k:] = 0.0
    if top_p < 1:
        kept &= mass.cumsum(0) - mass < torch.tensor(top_p).double() * mass.sum()
    mask = torch.empty_like(kept)
    mask[order] = kept
    return mask


def target_probs(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return [..., V] float64: the law that a token of `logits` [..., V] must have."""
    rows = logits.reshape(-1, logits.shape[-1])
    masks = torch.stack([sorted_truncation(row, temperature, top_k, top_p, min_p) for row in rows])
    scaled = (rows.double() / temperature).masked_fill(~masks, -torch.inf)
    return scaled.softmax(-1).reshape(logits.shape)


def random_case(
    mode: str, **fields: object
) -> tuple[Tensor, DraftOutput, TreeTensors, SamplingTensors, Tensor]:
    """Return the arguments of `verify` for 40 rows over four trees, with random drafts."""
    generator = torch.Generator().manual_seed(8)
    rows, vocab = 40, 5
    topologies = (WIDE, chain(3), root_only(), TreeTopology("star", (-1, 0, 0, 0, 0))) * (rows // 4)
    tree = TreeTensors.build(topologies, 12, torch.device("cpu"))
    logits = torch.randn(rows, 12, vocab, generator=generator)
    tokens = torch.randint(0, vocab, (rows, 12), generator=generator)
    probs = torch.rand(rows, 12, vocab, generator=generator).softmax(-1) if mode == "sampled drafts" else None
    sampling = sampling_tensors(rows, vocab, seed=torch.arange(rows), **fields)
    return (
        logits,
        DraftOutput(tokens.masked_fill(~tree.is_node, -1), probs),
        tree,
        sampling,
        torch.arange(rows),
    )


def on_device(value: object, device: str) -> object:
    """Return `value` with every tensor inside it on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(on_device(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: on_device(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value
