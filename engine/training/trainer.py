"""Training of a draft head: batches in a fixed order, gradient steps on float32 masters, checkpoints.

Where conversations come from is left to `dataset`, the loss to `online`, what a head accepts to `evaluate`.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.draft.network import DraftNetwork
from engine.errors import ConfigError, TrainingError
from engine.model.llama import LlamaForCausalLM
from engine.training.checkpoint import checkpoint_paths, load_checkpoint, save_checkpoint
from engine.training.dataset import PackedRows, batch_indices
from engine.training.online import Objective, OnlineDistillation
from engine.training.packed_attention import Documents
from engine.training.ranks import ALONE, Ranks
from engine.training.train_log import TrainingLog
from engine.training.unroll import PackedTokens, is_drafted


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How a head is trained. One step sees `batch_rows` rows.

    The learning rate rises over `warmup_steps`, then falls along a cosine to `final_share` of its peak.
    """

    num_steps: int
    batch_rows: int = 32
    learning_rate: float = 3e-3
    warmup_steps: int = 150
    final_share: float = 0.01
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    objective: Objective = field(default_factory=Objective)
    seed: int = 0
    log_every: int = 20
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_rows", "log_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        if not 0.0 < self.learning_rate <= 1.0:
            raise ConfigError(f"learning_rate must lie in (0, 1], found {self.learning_rate}")
        if not 0.0 < self.max_grad_norm < math.inf:
            raise ConfigError(f"max_grad_norm must be a positive number, found {self.max_grad_norm}")
        if min(self.warmup_steps, self.final_share, self.weight_decay) < 0:
            raise ConfigError("warmup_steps, final_share and weight_decay must be 0 or more")

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

    loss and survivors are this process's share; they add up over all processes.
    """

    loss: Tensor
    grad_norm: Tensor
    survivors: Tensor


class Trainer:
    """Trains `head`, already bound to `target`, on `rows`, and keeps its state in `folder`.

    The head runs in its own dtype, and the optimizer in float32 masters that are rounded into it after each
    step, so training sees the numbers that inference will. A trainer on a folder with a checkpoint goes on
    from it, bit for bit; `origin` says what else a checkpoint belongs to: the target's and the data's
    digests. Several processes (`ranks`) share each batch and hold equal heads.
    """

    def __init__(
        self,
        target: LlamaForCausalLM,
        head: DraftNetwork,
        rows: PackedRows,
        config: TrainingConfig,
        folder: Path,
        origin: Mapping[str, object] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        if rows.num_rows < config.batch_rows:
            raise ConfigError(f"{rows.num_rows} rows of data do not fill a batch of {config.batch_rows}")
        ranks.check_batch(config.batch_rows)
        self.head = head
        self.rows = rows
        self.config = config
        self.folder = folder
        self.step = 0
        self._ranks = ranks
        self._distillation = OnlineDistillation(target, head, config.objective)
        self._settings = {**dataclasses.asdict(config), **(origin or {})}
        self._device = head.head_rows.device
        self._masters = [param.detach().float().clone() for param in head.parameters()]
        self._optimizer = _build_optimizer(self._masters, config)
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    def train(self, max_seconds: float = math.inf) -> bool:
        """Run to the last step, or save and stop after `max_seconds`; return whether the last step was
        reached.

        Raises `TrainingError` once a loss is not finite or a file cannot be written; checkpoints written
        before it stay.
        """
        try:
            return self._train(max_seconds)
        except OSError as error:
            raise TrainingError(
                f"cannot write to {self.folder}: {error.strerror or error}; checkpoints written before stay: "
                "make room and start again"
            ) from error

    def _train(self, max_seconds: float) -> bool:
        config = self.config
        measures: list[StepMeasure] = []
        begin = start = time.perf_counter()
        folder = self.folder if self._ranks.is_first else None
        with TrainingLog(folder, self.step, config.num_steps) as log:
            is_over = self.step >= config.num_steps
            while not is_over:
                measures.append(self.train_step())
                log.advance()
                is_late = self._is_late(time.perf_counter() - begin, max_seconds)
                is_over = is_late or self.step == config.num_steps
                is_checkpoint = is_over or self.step % config.checkpoint_every == 0
                if is_checkpoint or self.step % config.log_every == 0:
                    log.write(self._summarize(measures, time.perf_counter() - start))
                    measures, start = [], time.perf_counter()
                if is_checkpoint:
                    self._save()
        return self.step >= config.num_steps

    def _is_late(self, seconds: float, max_seconds: float) -> bool:
        """Return whether time is up; processes decide together, at steps that log."""
        if max_seconds == math.inf or self.step % self.config.log_every != 0:
            return False
        votes = torch.tensor([float(seconds >= max_seconds)], device=self._device)
        self._ranks.add([votes])
        return bool(votes.item())

    def train_step(self) -> StepMeasure:
        """Run one step of gradient descent; nothing is read back to the host."""
        tokens, noise_seeds = self._batch()
        num_roots = is_drafted(tokens, 0).sum()
        self._ranks.add([num_roots])
        loss, survivors = self._distillation.loss(tokens, num_roots.clamp(min=1), noise_seeds)
        loss.backward()  # type: ignore[no-untyped-call]
        params: list[Tensor] = list(self.head.parameters())
        for master, param in zip(self._masters, params, strict=True):
            assert param.grad is not None, "every parameter of the head takes part in the loss"
            master.grad = param.grad.float()
            param.grad = None
        self._ranks.add([master.grad for master in self._masters if master.grad is not None])
        grad_norm = torch.nn.utils.clip_grad_norm_(self._masters, self.config.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.rate(self.step)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, self._masters)
        self.step += 1
        return StepMeasure(loss.detach(), grad_norm, survivors)

    def _batch(self) -> tuple[PackedTokens, list[int]]:
        """Return this process's rows of the step's batch, flat, and a noise seed for each."""
        config = self.config
        chosen = batch_indices(self.rows.num_rows, config.batch_rows, config.seed, self.step)
        chosen = self._ranks.share(chosen)
        positions = self.rows.positions[chosen].flatten().long()
        documents = Documents.from_positions(positions, self.rows.row_length)
        tokens = PackedTokens(
            self._send(self.rows.token_ids[chosen].flatten().long()),
            self._send(positions),
            self._send(self.rows.is_answer[chosen].flatten()),
            Documents(self._send(documents.offsets), documents.max_length),
        )
        first_seed = (config.seed << 32) + self.step * self.rows.num_rows
        return tokens, [(first_seed + row) % 2**63 for row in chosen.tolist()]

    def _send(self, tensor: Tensor) -> Tensor:
        """Copy to the device without waiting for it."""
        return (
            tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor
        )

    def _summarize(self, measures: list[StepMeasure], seconds: float) -> dict[str, Any]:
        """Return one log entry over the steps since the last; raises where one of them was not finite."""
        losses = torch.stack([measure.loss for measure in measures])
        totals = torch.stack([measure.survivors for measure in measures]).sum(0)
        self._ranks.add([losses])
        self._ranks.add([totals])
        norms = torch.stack([measure.grad_norm for measure in measures])
        is_finite = losses.isfinite() & norms.isfinite()
        if not is_finite.all():
            first = self.step - len(measures) + int(is_finite.logical_not().nonzero()[0, 0])
            raise TrainingError(
                f"the loss or its gradient is not finite at step {first}: lower the learning rate and start "
                f"again from the last checkpoint in {self.folder}"
            )
        survivors = totals.double().tolist()
        num_tokens = len(measures) * self.config.batch_rows * self.rows.row_length
        return {
            "step": self.step,
            "loss": float(losses.mean()),
            "grad_norm": round(float(norms.mean()), 4),
            "learning_rate": self.config.rate(self.step - 1),
            "acceptance": [
                round(after / max(before, 1.0), 4) for before, after in itertools.pairwise(survivors)
            ],
            "chain_tokens_per_call": round(sum(survivors) / max(survivors[0], 1.0), 4),
            "tokens_per_second": round(num_tokens / seconds),
        }

    def _save(self) -> None:
        """Write a checkpoint, by the first process for all."""
        if self._ranks.is_first:
            save_checkpoint(self.folder, self.step, self._settings, self._masters, self._optimizer)
        self._ranks.wait()

    def _resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        paths = checkpoint_paths(self.folder)
        if paths:
            self.step = load_checkpoint(paths[-1], self._settings, self._masters, self._optimizer)
            with torch.no_grad():
                torch._foreach_copy_(list(self.head.parameters()), self._masters)


def _build_optimizer(masters: list[Tensor], config: TrainingConfig) -> torch.optim.Optimizer:
    """Return AdamW over the masters; norm weights do not decay."""
    groups = [
        {"params": [master for master in masters if master.dim() != 2], "weight_decay": 0.0},
        {"params": [master for master in masters if master.dim() == 2], "weight_decay": config.weight_decay},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))
