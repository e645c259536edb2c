"""A draft folder checked against its target without serving it: what a registry must know before it takes
one.

Reading files is left to `loader`, keeping them to whoever asks.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.draft.loader import load_draft
from engine.errors import ModelLoadError
from engine.model.config import ModelConfig
from engine.weights.digest import file_digest, folder_digest

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """What a head is and for which target it was found to fit; digests are sha256 as hex."""

    weights_digest: str
    base_model_digest: str
    tokenizer_digest: str
    style: str
    num_layers: int
    draft_vocab_size: int
    num_parameters: int


def inspect_draft(folder: Path, model: Path) -> DraftFacts:
    """Load the draft of `folder` on the CPU as a server of `model` would, and return what it is.

    Costs one read of both networks' files and the memory of the head. Raises `ModelLoadError` for a file that
    is missing, corrupt or holds numbers that are not finite, `DraftMismatchError` for a head of another
    target.
    """
    draft = load_draft(folder)
    target = ModelConfig.load(model)
    base_digest = folder_digest(model)
    draft.config.check_target(target, base_digest)
    rows = torch.zeros((), dtype=draft.dtype).expand(target.vocab_size, target.hidden_size)
    network = draft.build(rows, rows, 1, draft.dtype, torch.device("cpu"))
    num_parameters = 0
    for name, tensor in network.state_dict().items():
        num_parameters += tensor.numel()
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ModelLoadError(f"{folder}: {name} holds numbers that are not finite: the draft is corrupt")
    return DraftFacts(
        weights_digest=draft.digest,
        base_model_digest=base_digest,
        tokenizer_digest=file_digest(model / TOKENIZER),
        style=draft.config.style,
        num_layers=draft.config.num_layers,
        draft_vocab_size=draft.config.draft_vocab_size,
        num_parameters=num_parameters,
    )
