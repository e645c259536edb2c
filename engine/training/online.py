"""Online distillation of one batch: the frozen target runs, the head is unrolled beside it, the losses add
up.

Nothing of the target is ever stored (arXiv 2508.08192, section 2). Optimizing is left to `trainer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.draft.network import DraftNetwork
from engine.errors import ConfigError
from engine.model.llama import LlamaForCausalLM
from engine.training.losses import LossWeights, distill_logits, smooth_l1
from engine.training.packed_attention import attend_documents
from engine.training.unroll import PackedTokens, is_drafted, unroll
from engine.training.vocab_select import invert


@dataclass(frozen=True, slots=True)
class Objective:
    """What a head is trained for, over `unroll_steps` draft steps; 1 is the training of EAGLE-1.

    Draft step s weighs `step_decay` ** s. A row is trained at step s only while its path so far had ranks
    under `max_parent_rank`: no tree holds the other paths. `feature_noise` u moves every feature by a uniform
    share in [-u, u] of the root mean square of its token's features.
    """

    unroll_steps: int = 5
    step_decay: float = 0.9
    max_parent_rank: int = 8
    feature_noise: float = 0.0
    losses: LossWeights = field(default_factory=LossWeights)

    def __post_init__(self) -> None:
        for name in ("unroll_steps", "max_parent_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        if not 0.0 < self.step_decay <= 1.0:
            raise ConfigError(f"step_decay must lie in (0, 1], found {self.step_decay}")
        if not 0.0 <= self.feature_noise < 1.0:
            raise ConfigError(f"feature_noise must lie in [0, 1), found {self.feature_noise}")


class OnlineDistillation:
    """The loss of `head`, already bound to `target`, on batches of packed tokens."""

    def __init__(self, target: LlamaForCausalLM, head: DraftNetwork, objective: Objective) -> None:
        if target.taps != head.config.taps:
            raise ConfigError(f"the target taps {target.taps}, the head reads {head.config.taps}")
        self.target = target.requires_grad_(requires_grad=False)
        self.head = head
        self.objective = objective
        self._draft_ids = invert(head.target_ids, head.config.target_vocab_size)

    def loss(
        self, tokens: PackedTokens, num_roots: Tensor, noise_seeds: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return (loss, survivors): the summed loss over `num_roots`, a float32 scalar, and [S + 1] int64.

        `num_roots` [] counts the roots of the whole batch, of which `tokens` may be a part. survivors[s]
        counts the roots whose first s drafts were all top-1. Each row of tokens has a noise seed of its own.
        """
        head, objective = self.head, self.objective
        hidden, teacher, features = self._teach(tokens)
        if objective.feature_noise > 0:
            features = add_noise(features, objective.feature_noise, noise_seeds)
        is_trained = is_accepted = is_drafted(tokens, 0)
        survivors = [is_accepted.sum()]
        loss = torch.zeros((), device=hidden.device)
        for step, drafted in enumerate(unroll(head, tokens, features, objective.unroll_steps)):
            labels = self._draft_ids[tokens.token_ids.roll(-step - 1, 0)]
            is_trained = is_trained & is_drafted(tokens, step) & (labels >= 0)
            weights = is_trained * (objective.step_decay**step / num_roots)
            rows = slice(step, step + len(drafted))
            part, ranks = distill_logits(
                drafted, head.head_rows, teacher[rows], weights, labels, objective.losses
            )
            loss = loss + part
            if objective.losses.smooth_l1 > 0:
                distance = smooth_l1(drafted, hidden.roll(-step, 0), weights)
                loss = loss + objective.losses.smooth_l1 * distance
            is_accepted = is_accepted & is_trained & (ranks == 0)
            is_trained = is_trained & (ranks < objective.max_parent_rank)
            survivors.append(is_accepted.sum())
        return loss, torch.stack(survivors)

    @torch.no_grad()
    def _teach(self, tokens: PackedTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return the target's (hidden [T, H], p over the draft vocabulary [T + S, Vd], features [T, F])."""
        attend = attend_documents(tokens.documents, self.target.config.num_kv_heads)
        output = self.target(tokens.token_ids, tokens.positions, attend)
        teacher = F.linear(output.hidden, self.head.head_rows).float().softmax(-1).to(output.hidden.dtype)
        # Rows past the end are never trained; padding makes the teacher of a step a view.
        return output.hidden, F.pad(teacher, (0, 0, 0, self.objective.unroll_steps)), output.features


def add_noise(features: Tensor, share: float, seeds: Sequence[int]) -> Tensor:
    """Return features [T, F] with uniform noise of at most `share` of each token's root mean square.

    T tokens are len(seeds) rows of equal length, and the noise of a row depends on its seed alone.
    """
    noise = torch.empty(
        len(seeds), features.shape[0] // len(seeds), features.shape[1], device=features.device
    )
    generator = torch.Generator(features.device)
    for row, seed in zip(noise, seeds, strict=True):
        row.uniform_(-share, share, generator=generator.manual_seed(seed))
    scale = features.float().square().mean(-1, keepdim=True).sqrt()
    return features + (noise.view_as(features) * scale).to(features.dtype)
