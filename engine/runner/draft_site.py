"""Where a runner keeps its draft head, and how another one takes its place between two steps.

When to do so, and what becomes of cached prefixes, is left to the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.draft.drafter import Drafter, TreeDrafter
from engine.draft.guarded import GuardedDrafter
from engine.draft.loader import LoadedDraft, load_draft
from engine.draft.network import DraftNetwork
from engine.draft_restart import DraftRestart
from engine.errors import ConfigError, DraftMismatchError, ModelLoadError
from engine.kvcache.kv_pool import KVPool
from engine.layers.linear import can_pack
from engine.model.llama import LlamaForCausalLM
from engine.runner.graphs import StepGraphs
from engine.runner.pending import PendingDraft
from engine.runner.prefill_graphs import PrefillGraphs
from engine.runner.slot_state import SlotState
from engine.speculation import upload


@dataclass(frozen=True, slots=True)
class NextDraft:
    """A head that is ready to serve, and the pages it will write to."""

    head: DraftNetwork
    pool: KVPool
    digest: str


class DraftSite:
    """The parts of one runner that depend on the draft's weights."""

    def __init__(
        self,
        target: LlamaForCausalLM,
        drafter: TreeDrafter | None,
        state: SlotState,
        pending: PendingDraft,
        prefill: PrefillGraphs,
        graphs: StepGraphs | None,
    ) -> None:
        self._target, self._drafter = target, drafter
        self._state, self._pending, self._prefill, self._graphs = state, pending, prefill, graphs

    @property
    def failure(self) -> str:
        """What the drafter raised; empty while it works."""
        return self._drafter.failure if isinstance(self._drafter, GuardedDrafter) else ""

    @property
    def pools(self) -> tuple[KVPool, ...]:
        """The pages of the draft, where its drafter has some."""
        return (self._drafter.pool,) if isinstance(self._drafter, Drafter | GuardedDrafter) else ()

    def load(self, folder: Path, digest: str | None, model_digest: str, num_siblings: int) -> NextDraft:
        """Read and check the draft of `folder`; nothing of the running one changes, so any thread may.

        `num_siblings` is the most children that a node of the engine's trees has. Raises `ModelLoadError`,
        `ConfigError`, or what the memory of the device does.
        """
        serving = self._serving()
        loaded = load_draft(folder)
        if digest is not None and loaded.digest != digest:
            raise ModelLoadError(f"{folder} holds weights {loaded.digest}, {digest} was asked for")
        loaded.config.check_target(self._target.config, model_digest)
        self._check_fit(loaded, num_siblings)
        weight = self._target.embed_tokens.weight
        num_positions = serving.head.rotary.table.shape[0]
        head = loaded.build(
            weight, self._target.head_weight, num_positions, serving.head.embed_rows.dtype, weight.device
        )
        if not all(bool(values.isfinite().all()) for values in (*head.parameters(), *head.buffers())):
            raise ModelLoadError(f"{folder} has weights that are not finite: fetch the draft again")
        if can_pack(weight.device, weight.dtype):
            head.pack()
        head.use(serving.head.ops)
        return NextDraft(head, _pool_for(head, serving.pool), loaded.digest)

    @torch.inference_mode()
    def install(self, draft: NextDraft, restarts: Sequence[DraftRestart]) -> None:
        """Draft with another head from the next step on, none of whose K/V is written yet.

        Captured steps keep the target's part; the draft's is captured anew where it is first needed.
        """
        self._serving().adopt(draft.head, draft.pool)
        _restart(self._state, restarts)
        self._pending.forget()
        self._prefill.forget_drafts()
        if self._graphs is not None:
            self._graphs.forget_drafts()

    def _serving(self) -> GuardedDrafter:
        if not isinstance(self._drafter, GuardedDrafter):
            raise ConfigError("this engine was started without a draft, so no other can take its place")
        return self._drafter

    def _check_fit(self, loaded: LoadedDraft, num_siblings: int) -> None:
        config = loaded.config
        if config.taps != self._target.taps:
            raise DraftMismatchError(
                f"the draft reads the target's taps {list(config.taps)}, this engine keeps "
                f"{list(self._target.taps)}: start it with this draft"
            )
        if config.draft_vocab_size < num_siblings:
            raise ConfigError(
                f"the engine's trees have up to {num_siblings} children of a node, the draft "
                f"{config.draft_vocab_size} tokens: start the engine with this draft"
            )


def _pool_for(head: DraftNetwork, serving: KVPool) -> KVPool:
    """Return the pages that serve, where the head's K/V has the same shape, else new ones as many."""
    config = head.config
    num_layers, num_blocks, block_size, *kv_shape = serving.k.shape
    if [config.num_layers, config.num_kv_heads, config.head_dim] == [num_layers, *kv_shape]:
        return serving
    return KVPool(
        config.num_layers,
        num_blocks,
        block_size,
        config.num_kv_heads,
        config.head_dim,
        serving.k.dtype,
        serving.k.device,
    )


def _restart(state: SlotState, restarts: Sequence[DraftRestart]) -> None:
    """Count no draft K/V of any slot as written. Of a prompt under way the coming chunks write theirs, and
    its root is where drafting will begin; a row that decodes is filled from its window of features.
    """
    columns = (
        [restart.slot for restart in restarts],
        [restart.start for restart in restarts],
        [restart.is_prefilling for restart in restarts],
    )
    numbers = [int(value) for column in columns for value in column]
    slots, starts, is_prefilling = upload(numbers, torch.int64, state.device).view(3, -1)
    tables = state.tables
    tables.draft_start[slots] = starts
    tables.draft_len[slots] = torch.where(is_prefilling > 0, tables.seq_len[slots], starts)
