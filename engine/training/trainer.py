"""Training of a draft head by online distillation: the frozen target runs in every step, and no feature is
ever stored.

Where conversations come from is left to `dataset`, what the trained head accepts to `evaluate`.
"""

import dataclasses
import itertools
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.draft.head import DraftHead
from engine.errors import ConfigError, TrainingError
from engine.model.llama import LlamaForCausalLM
from engine.training.dataset import PackedRows, batch_indices
from engine.training.losses import LossWeights, smooth_l1, soft_cross_entropy
from engine.training.packed_attention import Documents, attend_documents
from engine.training.unroll import PackedTokens, is_drafted, unroll
from engine.training.vocab_select import invert

_NUM_CHECKPOINTS = 2


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How a head is trained. One step sees `batch_rows` rows, unrolled over `unroll_steps` draft steps.

    Draft step s weighs `step_decay` ** s. A row is trained at step s only while its path so far had ranks
    under `max_parent_rank`: no tree holds the other paths. The learning rate rises over `warmup_steps`, then
    falls along a cosine to `final_share` of its peak.
    """

    num_steps: int
    batch_rows: int = 32
    unroll_steps: int = 5
    step_decay: float = 0.9
    max_parent_rank: int = 8
    learning_rate: float = 3e-3
    warmup_steps: int = 150
    final_share: float = 0.01
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    losses: LossWeights = field(default_factory=LossWeights)
    seed: int = 0
    log_every: int = 20
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        names = ("num_steps", "batch_rows", "unroll_steps", "max_parent_rank", "log_every")
        for name in (*names, "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.learning_rate <= 0 or self.max_grad_norm <= 0:
            raise ConfigError("learning_rate and max_grad_norm must be positive")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        share = (step - self.warmup_steps) / max(self.num_steps - self.warmup_steps, 1)
        cosine = 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
        return self.learning_rate * (self.final_share + (1 - self.final_share) * cosine)


@dataclass(frozen=True, slots=True)
class StepMeasure:
    """One training step. loss, grad_norm: float32 scalars; survivors: [S + 1] int64, the roots whose first s
    drafts were all top-1, so that survivors[s + 1] / survivors[s] is the acceptance of depth s + 1.
    """

    loss: Tensor
    grad_norm: Tensor
    survivors: Tensor


class Trainer:
    """Trains `head`, already bound to `target`, on `rows`, and keeps its state in `folder`.

    The head runs in its own dtype, and the optimizer in float32 masters that are rounded into it after each
    step, so training sees the numbers that inference will. A trainer on a folder with a checkpoint goes on
    from it, bit for bit.
    """

    def __init__(
        self,
        target: LlamaForCausalLM,
        head: DraftHead,
        rows: PackedRows,
        config: TrainingConfig,
        folder: Path,
    ) -> None:
        if target.taps != head.config.taps:
            raise ConfigError(f"the target taps {target.taps}, the head reads {head.config.taps}")
        if rows.num_rows < config.batch_rows:
            raise ConfigError(f"{rows.num_rows} rows of data do not fill a batch of {config.batch_rows}")
        self.target = target.requires_grad_(requires_grad=False)
        self.head = head
        self.rows = rows
        self.config = config
        self.folder = folder
        self.step = 0
        self._device = head.head_rows.device
        self._draft_ids = invert(head.target_ids, head.config.target_vocab_size)
        self._masters = [param.detach().float().clone() for param in head.parameters()]
        self._optimizer = _build_optimizer(self._masters, config)
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    def train(self) -> None:
        """Run to the last step. Raises `TrainingError` once a loss is not finite; checkpoints written before
        it stay.
        """
        from tqdm import tqdm

        config = self.config
        measures: list[StepMeasure] = []
        start = time.perf_counter()
        with (
            (self.folder / "log.jsonl").open("a", encoding="utf-8") as log,
            tqdm(total=config.num_steps, initial=self.step, desc="train", disable=None) as bar,
        ):
            while self.step < config.num_steps:
                measures.append(self.train_step())
                bar.update()
                is_checkpoint = self.step % config.checkpoint_every == 0 or self.step == config.num_steps
                if is_checkpoint or self.step % config.log_every == 0:
                    entry = self._summarize(measures, time.perf_counter() - start)
                    log.write(json.dumps(entry) + "\n")
                    log.flush()
                    bar.set_postfix(loss=entry["loss"], accepted=entry["acceptance"][0])
                    measures, start = [], time.perf_counter()
                if is_checkpoint:
                    self._save()

    def train_step(self) -> StepMeasure:
        """Run one step of gradient descent; nothing is read back to the host."""
        loss, survivors = self._loss(self._batch())
        loss.backward()  # type: ignore[no-untyped-call]
        params: list[Tensor] = list(self.head.parameters())
        for master, param in zip(self._masters, params, strict=True):
            assert param.grad is not None, "every parameter of the head takes part in the loss"
            master.grad = param.grad.float()
            param.grad = None
        grad_norm = torch.nn.utils.clip_grad_norm_(self._masters, self.config.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.rate(self.step)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, self._masters)
        self.step += 1
        return StepMeasure(loss.detach(), grad_norm, survivors)

    def _batch(self) -> PackedTokens:
        chosen = batch_indices(self.rows.num_rows, self.config.batch_rows, self.config.seed, self.step)
        positions = self.rows.positions[chosen].flatten().long()
        documents = Documents.from_positions(positions, self.rows.row_length)
        return PackedTokens(
            self._send(self.rows.token_ids[chosen].flatten().long()),
            self._send(positions),
            self._send(self.rows.is_answer[chosen].flatten()),
            Documents(self._send(documents.offsets), documents.max_length),
        )

    def _send(self, tensor: Tensor) -> Tensor:
        """Copy to the device without waiting for it."""
        return (
            tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor
        )

    def _loss(self, tokens: PackedTokens) -> tuple[Tensor, Tensor]:
        """Return (loss, survivors), averaged over the roots of the batch."""
        head, config = self.head, self.config
        with torch.no_grad():
            attend = attend_documents(tokens.documents, self.target.config.num_kv_heads)
            output = self.target(tokens.token_ids, tokens.positions, attend)
            teacher = F.linear(output.hidden, head.head_rows).float().softmax(-1).to(output.hidden.dtype)
            # Rows past the end are never trained; padding makes the teacher of a step a view.
            teacher = F.pad(teacher, (0, 0, 0, config.unroll_steps))
        is_root = is_drafted(tokens, 0)
        num_roots = is_root.sum().clamp(min=1)
        is_trained, is_accepted = is_root, is_root
        survivors = [is_root.sum()]
        loss = torch.zeros((), device=self._device)
        for step, hidden in enumerate(unroll(head, tokens, output.features, config.unroll_steps)):
            labels = self._draft_ids[tokens.token_ids.roll(-step - 1, 0)]
            is_trained = is_trained & is_drafted(tokens, step) & (labels >= 0)
            weights = is_trained * (config.step_decay**step / num_roots)
            cross_entropy, ranks = soft_cross_entropy(
                hidden, head.head_rows, teacher[step : step + len(hidden)], weights, labels
            )
            loss = loss + config.losses.cross_entropy * cross_entropy
            if config.losses.smooth_l1 > 0:
                distance = smooth_l1(hidden, output.hidden.roll(-step, 0), weights)
                loss = loss + config.losses.smooth_l1 * distance
            is_accepted = is_accepted & is_trained & (ranks == 0)
            is_trained = is_trained & (ranks < config.max_parent_rank)
            survivors.append(is_accepted.sum())
        return loss, torch.stack(survivors)

    def _summarize(self, measures: list[StepMeasure], seconds: float) -> dict[str, Any]:
        """Return one log entry over the steps since the last; raises where one of them was not finite."""
        losses = torch.stack([measure.loss for measure in measures])
        norms = torch.stack([measure.grad_norm for measure in measures])
        is_finite = losses.isfinite() & norms.isfinite()
        if not is_finite.all():
            first = self.step - len(measures) + int(is_finite.logical_not().nonzero()[0, 0])
            raise TrainingError(
                f"the loss or its gradient is not finite at step {first}: lower the learning rate and start "
                f"again from the last checkpoint in {self.folder}"
            )
        survivors = torch.stack([measure.survivors for measure in measures]).sum(0).double().tolist()
        num_tokens = len(measures) * self.config.batch_rows * self.rows.row_length
        return {
            "step": self.step,
            "loss": round(float(losses.mean()), 5),
            "grad_norm": round(float(norms.mean()), 4),
            "learning_rate": self.config.rate(self.step - 1),
            "acceptance": [
                round(after / max(before, 1.0), 4) for before, after in itertools.pairwise(survivors)
            ],
            "chain_tokens_per_call": round(sum(survivors) / max(survivors[0], 1.0), 4),
            "tokens_per_second": round(num_tokens / seconds),
        }

    def _save(self) -> None:
        """Write a checkpoint atomically, and drop all but the newest few."""
        path = self.folder / f"checkpoint-{self.step:07d}.pt"
        temporary = path.with_suffix(".tmp")
        state = {
            "step": self.step,
            "config": dataclasses.asdict(self.config),
            "masters": self._masters,
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, temporary)
        temporary.replace(path)
        for old in checkpoint_paths(self.folder)[:-_NUM_CHECKPOINTS]:
            old.unlink()

    def _resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        paths = checkpoint_paths(self.folder)
        if not paths:
            return
        state = torch.load(paths[-1], map_location=self._device, weights_only=True)
        if state["config"] != dataclasses.asdict(self.config):
            raise ConfigError(
                f"{paths[-1]} was trained with other settings: {state['config']}; use a fresh folder"
            )
        self.step = state["step"]
        with torch.no_grad():
            torch._foreach_copy_(self._masters, state["masters"])
            torch._foreach_copy_(list(self.head.parameters()), self._masters)
        self._optimizer.load_state_dict(state["optimizer"])


def checkpoint_paths(folder: Path) -> list[Path]:
    """Return the checkpoints of a training folder, oldest first."""
    return sorted(folder.glob("checkpoint-*.pt"))


def _build_optimizer(masters: list[Tensor], config: TrainingConfig) -> torch.optim.Optimizer:
    """Return AdamW over the masters; norm weights do not decay."""
    groups = [
        {"params": [master for master in masters if master.dim() != 2], "weight_decay": 0.0},
        {"params": [master for master in masters if master.dim() == 2], "weight_decay": config.weight_decay},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))
