"""An engine over random weights with replayed acceptance, and prompts whose contexts are cached already.

It is what benchmarks of models run on whose weights are not at hand; measuring is left to them.
"""

from collections.abc import Sequence as Prompts
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.draft.config import DraftConfig
from engine.draft.head import DraftHead
from engine.engine import assemble_engine
from engine.errors import CapacityError, ConfigError
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.kv_cache import KVCache
from engine.model.config import ModelConfig
from engine.model.llama import LlamaForCausalLM
from engine.request import Request, SamplingParams, Sequence
from engine.runner.calibrate import choose_device, choose_dtype
from engine.runner.memory import bytes_per_block
from engine.runner.rates import synchronize
from engine.runner.replay import ReplayedVerify
from engine.runner.synthetic import (
    eagle3_config,
    fill_pages,
    head_sizes,
    random_head,
    random_target,
    target_sizes,
)
from engine.runner.worker import Origin, choose_verify, count_positions, wire_worker
from engine.tree.library import TreeLibrary
from engine.tree.search import Profile, acceptance_length, search

_WORKSPACE_BYTES = 2 << 30  # libraries, graphs, and the activations of a step but for its logits
_NUM_LOGIT_COPIES = 6  # graphs of every number of rows keep theirs, and warping makes more


@dataclass(frozen=True, slots=True)
class SyntheticWeights:
    """A target and its draft head with random weights on their device."""

    name: str
    target: LlamaForCausalLM
    head: DraftHead

    @staticmethod
    def create(name: str, model: ModelConfig, config: EngineConfig) -> "SyntheticWeights":
        """Make both for the device, dtype and length that `config` asks for."""
        device = choose_device(config)
        dtype = choose_dtype(config, model, device)
        num_positions = count_positions(config, model)
        draft = eagle3_config(model)
        target = random_target(model, draft.taps, num_positions, dtype, device)
        return SyntheticWeights(name, target, random_head(draft, target, num_positions))


@dataclass(frozen=True, slots=True)
class WorkPart:
    """A part of a step that must end before the next begins, and the least it reads and multiplies."""

    name: str
    num_bytes: int
    num_flops: int


class SyntheticEngine:
    """An `Engine` that accepts drafts as `profile` says, with the best trees of that profile.

    `tree_sizes` holds (nodes, most levels of drafts) of each. Every page of the cache holds random K and V.
    """

    def __init__(
        self,
        config: EngineConfig,
        weights: SyntheticWeights,
        profile: Profile,
        tree_sizes: Prompts[tuple[int, int]],
    ) -> None:
        self._target, self._head = weights.target, weights.head
        self._profile = profile
        self._device = weights.target.embed_tokens.weight.device
        self._replay = ReplayedVerify(profile, self._device, choose_verify(self._device))
        max_depth = config.speculation.feature_window - 1
        trees = [search(profile, num_nodes, depth) for num_nodes, depth in tree_sizes]
        self._library = TreeLibrary(trees, max_depth)
        origin = Origin(weights.name, "", "synthetic weights", "synthetic weights")
        worker = wire_worker(config, self._target, self._head, self._library, origin, self._replay)
        for seed, pool in enumerate(worker.runner.page_pools):
            fill_pages(pool, seed)
        self._kv_cache = KVCache(BlockPool(worker.facts.num_blocks + 1, worker.facts.block_size))
        self.engine = assemble_engine(config, worker, self._kv_cache)

    def random_prompts(self, batch: int, context: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
        """Return prompts of `context` tokens and one more, the root of the first step; no two are alike."""
        generator = torch.Generator().manual_seed(seed)
        vocab_size = self._target.config.vocab_size
        rows = torch.randint(vocab_size, (batch, context + 1), generator=generator).tolist()
        return tuple(tuple(row) for row in rows)

    def cache(self, prompts: Prompts[tuple[int, ...]]) -> None:
        """Let all but the last token of every prompt be found in the cache, and nothing else.

        The pages they are given keep what they hold. Raises `ConfigError` where a context does not end with
        a block and `CapacityError` where the cache is too small.
        """
        cache_contexts(self._kv_cache, prompts)

    def expected_tokens_per_call(self, tree: str) -> float:
        return acceptance_length(self._library.get(tree), self._profile)

    def work(self, tree: str, batch: int, context: int) -> tuple[WorkPart, ...]:
        """Return what one step of `batch` rows over `tree` cannot avoid, each behind `context` cached tokens.

        Weights and K/V are read once by each pass; activations, embeddings and norms are left out.
        """
        topology, model, draft = self._library.get(tree), self._target.config, self._head.config
        itemsize = self._target.embed_tokens.weight.dtype.itemsize
        target, head = target_sizes(model, itemsize), head_sizes(draft, itemsize)
        num_cached = batch * context
        # The first pass of the draft brings its cache up to the root, the others run the levels but the last.
        widths = [topology.depth + 1, *map(len, topology.levels[1:-1])] if topology.depth else []
        parts = []
        for idx, width in enumerate(widths):
            parts += [
                WorkPart(
                    f"draft {idx} products", head.num_matrix * itemsize, 2 * head.num_matrix * batch * width
                ),
                WorkPart(f"draft {idx} attention", num_cached * head.kv_bytes, 0),
            ]
        num_tokens = batch * topology.num_nodes
        attention_flops = 4 * topology.num_nodes * num_cached * model.query_size * model.num_layers
        parts += [
            WorkPart("target products", target.num_matrix * itemsize, 2 * target.num_matrix * num_tokens),
            WorkPart("target attention", num_cached * target.kv_bytes, attention_flops),
        ]
        return tuple(parts)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        synchronize(self._device)

    def checksum(self) -> int:
        """Return the sum of what the real verifications emitted, whatever was replayed in its place."""
        return self._replay.checksum()


def cache_contexts(kv_cache: KVCache, prompts: Prompts[tuple[int, ...]]) -> None:
    """Publish all but the last token of every prompt, and nothing else; see `SyntheticEngine.cache`."""
    pool = kv_cache.pool
    num_blocks = sum(kv_cache.num_blocks_for(len(prompt) - 1) for prompt in prompts)
    if any((len(prompt) - 1) % pool.block_size for prompt in prompts):
        raise ConfigError(f"contexts must be multiples of the block size, {pool.block_size}")
    pool.clear_index()
    if num_blocks > pool.num_available:
        raise CapacityError(f"the contexts need {num_blocks} blocks, {pool.num_available} are available")
    for row, prompt in enumerate(prompts):
        context = len(prompt) - 1
        sequence = Sequence(Request(f"context-{row}", prompt, SamplingParams()), seed=0, arrival_idx=row)
        hit = kv_cache.admit(sequence, context, num_spare=0)
        assert hit is not None, pool.counts()
        kv_cache.publish(sequence, context, range(context))
        kv_cache.release(sequence)


def predict_bytes(model: ModelConfig, config: EngineConfig, num_blocks: int, num_nodes: int) -> int:
    """Return the device memory of a synthetic engine in a 16-bit dtype: weights, pages, and a workspace for
    `num_nodes` nodes in every row.
    """
    draft: DraftConfig = eagle3_config(model)
    dtype = torch.bfloat16
    num_kept = target_sizes(model, dtype.itemsize).num_kept + head_sizes(draft, dtype.itemsize).num_kept
    assert config.block_size is not None, "a synthetic engine states its block size"
    pages = num_blocks * bytes_per_block(config.block_size, model, draft, dtype)
    logits = config.max_num_seqs * num_nodes * model.vocab_size * dtype.itemsize
    return num_kept * dtype.itemsize + pages + _NUM_LOGIT_COPIES * logits + _WORKSPACE_BYTES
