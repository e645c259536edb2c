"""Reading a draft folder strictly, and writing one.

What the tensors mean is left to `head`; whether they fit a target to `DraftConfig.check_target`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.draft.config import DraftConfig
from engine.draft.config_file import load_config, save_config
from engine.draft.network import DraftNetwork, create_network
from engine.draft.quantize import DequantizedSource
from engine.errors import DraftMismatchError, ModelLoadError
from engine.tree.library import DEFAULT_PROFILE
from engine.tree.profile import MeasuredProfile
from engine.tree.search import Profile
from engine.weights.digest import file_digest
from engine.weights.json_object import read_json_object
from engine.weights.loader import load_into
from engine.weights.mapping import identity_mapping
from engine.weights.safetensors import SafetensorsFile, write_safetensors

CONFIG, WEIGHTS, MANIFEST, TREES = "config.json", "model.safetensors", "manifest.json", "trees.json"


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft folder whose manifest held: every file it names has the digest it names.

    `digest` is that of the weights file. `trees` is the folder's own tree library, where it ships one, and
    `profile` the acceptance that its manifest states, else that of a small head.
    """

    folder: Path
    config: DraftConfig
    digest: str
    trees: Path | None
    profile: Profile = DEFAULT_PROFILE

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the weights are stored in."""
        return SafetensorsFile(self.folder / WEIGHTS).entries["fc.weight"].dtype

    def build(
        self, embedding: Tensor, head: Tensor, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> DraftNetwork:
        """Return the network on `device`, bound to the target's embedding and output head, both [V, H]."""
        network = create_network(self.config, num_positions=num_positions, dtype=dtype).to(device)
        source = DequantizedSource(SafetensorsFile(self.folder / WEIGHTS))
        load_into(network, source, identity_mapping(network.state_dict()))
        check_vocabulary(network.target_ids, self.config.target_vocab_size)
        network.requires_grad_(False)
        network.bind(embedding, head)
        return network.eval()


def load_draft(folder: Path) -> LoadedDraft:
    """Check the manifest of a draft folder and read its config; the weights are read by `build`.

    Raises `ModelLoadError` for a missing or corrupt file, `ConfigError` for a profile that cannot be.
    """
    manifest = read_json_object(folder / MANIFEST)
    files = manifest.get("files")
    if not isinstance(files, dict) or not {CONFIG, WEIGHTS} <= files.keys():
        raise ModelLoadError(f"{folder / MANIFEST} must name the sha256 of {CONFIG} and {WEIGHTS}")
    for name, expected in files.items():
        found = file_digest(folder / name)
        if found != expected:
            raise ModelLoadError(
                f"{folder / name} has sha256 {found}, its manifest says {expected}: fetch the draft again"
            )
    trees = folder / TREES if TREES in files else None
    profile = DEFAULT_PROFILE
    if "acceptance_profile" in manifest:
        profile = MeasuredProfile.load(folder / MANIFEST).probabilities
    return LoadedDraft(folder, load_config(folder / CONFIG), files[WEIGHTS], trees, profile)


def save_draft(
    head: DraftNetwork,
    folder: Path,
    manifest: dict[str, object],
    trees: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a draft folder: weights in `dtype`, config, the JSON text of its trees, and a manifest with
    digests.

    `manifest` says where the head comes from; `files` is added to it. The manifest is written last, so a
    folder that has one is whole.
    """
    state = head.state_dict().items()
    tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state}
    write_draft(head.config, tensors, folder, manifest, trees)


def write_draft(
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    folder: Path,
    manifest: dict[str, object],
    trees: str | None,
) -> None:
    """Write a draft folder of `tensors` as they are; see `save_draft`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    save_config(config, folder / CONFIG)
    write_safetensors(folder / WEIGHTS, tensors)
    names = [CONFIG, WEIGHTS]
    if trees is not None:
        (folder / TREES).write_text(trees, encoding="utf-8")
        names.append(TREES)
    files = {name: file_digest(folder / name) for name in names}
    text = json.dumps({**manifest, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def check_vocabulary(target_ids: Tensor, vocab_size: int) -> None:
    """Refuse a vocabulary map that leaves the target's ids or names one twice."""
    if int(target_ids.min()) < 0 or int(target_ids.max()) >= vocab_size:
        raise DraftMismatchError(
            f"the draft's target_ids must lie in 0..{vocab_size - 1}: the head is not for this model"
        )
    if torch.unique(target_ids).numel() != target_ids.numel():
        raise ModelLoadError("the draft's target_ids name a token twice: the head is corrupt")
