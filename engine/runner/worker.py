"""Building a runner: load target and draft from folders, plan the memory, wire the parts.

It is the only place that knows every part; what each does is left to them.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.registry import create_backend
from engine.config import EngineConfig
from engine.draft.drafter import Drafter
from engine.draft.guarded import GuardedDrafter
from engine.draft.loader import LoadedDraft, load_draft
from engine.draft.network import DraftNetwork
from engine.draft.ops import DraftOps, TorchDraftOps
from engine.errors import ConfigError
from engine.grammar.backend import open_backend
from engine.grammar.vocabulary import ModelTokens
from engine.kvcache.kv_cache import block_table_width
from engine.kvcache.kv_pool import KVPool
from engine.layers.linear import can_pack
from engine.layers.quantize import quantize
from engine.layers.tuned_linear import WideLinear, tune_linears
from engine.model.config import ModelConfig
from engine.model.llama import LlamaForCausalLM
from engine.precision import PrecisionConfig
from engine.runner.calibrate import choose_device, choose_dtype, choose_num_threads
from engine.runner.memory import plan_num_blocks
from engine.runner.runner import ModelRunner, RunnerShape
from engine.runner.slot_ops import SlotOps, TorchSlotOps
from engine.sampling.verify import Verify, verify
from engine.stats import EngineFacts
from engine.tree.library import DEFAULT_PROFILE, TreeLibrary
from engine.tree.search import Profile
from engine.tree.topology import MAX_NODES
from engine.weights.digest import folder_digest
from engine.weights.loader import load_into
from engine.weights.mapping import llama_mapping
from engine.weights.shards import open_weights


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the weights of a worker come from; a digest names the bytes."""

    model_name: str
    model_folder: str
    model_digest: str
    draft_digest: str | None


@dataclass(frozen=True, slots=True)
class Worker:
    """A runner that is ready, the trees it may run, and what the machine and the draft answered on the
    way.
    """

    runner: ModelRunner
    library: TreeLibrary
    facts: EngineFacts
    profile: Profile = DEFAULT_PROFILE  # how often drafts are right, as far as it is known before the first


def build_worker(config: EngineConfig) -> Worker:
    """Load everything `config` names. Raises `ModelLoadError` or `ConfigError` before the cache is
    allocated.
    """
    started = time.perf_counter()
    torch.set_num_threads(choose_num_threads(config))
    model = ModelConfig.load(config.model)
    num_positions = count_positions(config, model)
    device = choose_device(config)
    dtype = choose_dtype(config, model, device)
    model_digest = folder_digest(config.model)
    draft = None if config.draft is None else load_draft(config.draft)
    if draft is not None:
        draft.config.check_target(model, model_digest)
    target = load_target(
        config.model, model, draft.config.taps if draft else (), num_positions, dtype, device
    )
    head = None
    if draft is not None:
        head = draft.build(target.embed_tokens.weight, target.head_weight, num_positions, dtype, device)
    origin = Origin(
        config.model.name, str(config.model), model_digest, draft.digest if draft is not None else None
    )
    worker = wire_worker(config, target, head, build_library(config, draft), origin)
    worker = replace(worker, facts=replace(worker.facts, load_seconds=time.perf_counter() - started))
    return worker if draft is None else replace(worker, profile=draft.profile)


def wire_worker(
    config: EngineConfig,
    target: LlamaForCausalLM,
    head: DraftNetwork | None,
    library: TreeLibrary,
    origin: Origin,
    verify: Verify | None = None,
) -> Worker:
    """Put a runner around networks that are on their device already, in the dtype they have.

    Both must know `count_positions` positions. They may be wired again once the worker is gone. Drafts are
    verified by `verify`, else by what `choose_verify` returns. Raises `ConfigError` where the cache does not
    fit.
    """
    model, weight = target.config, target.embed_tokens.weight
    device, dtype = weight.device, weight.dtype
    prepare_networks(config.precision, target, head)
    sizes = config.device_sizes(device.type == "cuda")
    max_model_len = _choose_max_model_len(config, model)
    backend = create_backend(config.attention_backend, device)
    kv_dtype = _choose_kv_dtype(config.precision, dtype, backend)
    num_blocks = plan_num_blocks(config, model, head.config if head else None, kv_dtype, device)
    shape = RunnerShape(
        max_num_seqs=config.max_num_seqs,
        num_blocks=num_blocks,
        block_size=sizes.block_size,
        table_width=block_table_width(max_model_len, library.max_depth, sizes.block_size),
        feature_window=config.speculation.feature_window,
        draft_mode=config.speculation.draft_mode,
        kv_dtype=kv_dtype,
    )
    drafter = None if head is None else create_drafter(head, backend, shape)
    tokens = ModelTokens(Path(origin.model_folder), model.vocab_size, model.eos_token_ids)
    parts = (verify or choose_verify(device), choose_slot_ops(device), partial(open_backend, tokens))
    runner = ModelRunner(target, drafter, backend, shape, model.eos_token_ids, *parts)
    return Worker(
        runner=runner,
        library=library,
        facts=EngineFacts(
            model_name=origin.model_name,
            model_folder=origin.model_folder,
            model_digest=origin.model_digest,
            draft_digest=origin.draft_digest,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            attention_backend=backend.name,
            num_threads=torch.get_num_threads(),
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=sizes.max_batched_tokens,
            block_size=sizes.block_size,
            num_blocks=num_blocks - 1,
            trees=(*library.names, *(f"chain-{depth}" for depth in range(1, library.max_depth + 1))),
        ),
    )


def prepare_networks(precision: PrecisionConfig, target: LlamaForCausalLM, head: DraftNetwork | None) -> None:
    """Put the weights that `precision` names into fewer bits, and all where the kernels of this device want
    them; there is no way back. Raises `ConfigError` for sizes that have no kernels.
    """
    weight = target.embed_tokens.weight
    device = weight.device
    if precision.target == "fp8":
        if device.type == "cuda":
            from engine.kernels.quantize import quantize_rows

            quantize(target.layers, "fp8", partial(quantize_rows, overlap=_can_overlap(device)))
        else:
            quantize(target.layers, "fp8")
    if precision.draft == "int4-ffn" and head is not None:
        quantize(head.layers, "int4-ffn")
    if can_pack(device, weight.dtype):
        target.pack()
        if head is not None:
            head.pack()
    if device.type == "cuda":
        use_kernels(target, head, device)


def _choose_kv_dtype(
    precision: PrecisionConfig, dtype: torch.dtype, backend: AttentionBackend
) -> torch.dtype:
    if precision.cache == "model":
        return dtype
    if backend.name != "triton":
        raise ConfigError(
            f"precision.cache fp8 needs attention_backend triton on a GPU, found {backend.name}"
        )
    return torch.float8_e4m3fn


def choose_verify(device: torch.device) -> Verify:
    """Return the implementation of `verify` for a device."""
    if device.type != "cuda":
        return verify
    from engine.sampling.triton_verify import TritonVerify

    return TritonVerify(overlap=_can_overlap(device))


def choose_slot_ops(device: torch.device) -> SlotOps:
    """Return the implementation of `SlotOps` for a device."""
    if device.type != "cuda":
        return TorchSlotOps()
    from engine.runner.triton_slot_ops import TritonSlotOps

    return TritonSlotOps(overlap=_can_overlap(device))


def choose_draft_ops(device: torch.device) -> DraftOps:
    """Return the implementation of `DraftOps` for a device."""
    if device.type != "cuda":
        return TorchDraftOps()
    from engine.draft.triton_ops import TritonDraftOps

    return TritonDraftOps(overlap=_can_overlap(device))


def use_kernels(target: LlamaForCausalLM, head: DraftNetwork | None, device: torch.device) -> None:
    """Run the networks on fused kernels."""
    from engine.layers.triton_ops import TritonOps

    ops = TritonOps(overlap=_can_overlap(device))
    target.use(ops)
    tune_linears(target.layers)
    if target.head_weight.dtype.itemsize == 2:
        target.fast_head = WideLinear(target.head_weight)
    if head is not None:
        head.use(ops)


def _can_overlap(device: torch.device) -> bool:
    """Return whether a launch may begin before the kernel ahead has ended: since compute capability 9."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def count_positions(config: EngineConfig, model: ModelConfig) -> int:
    """Return the positions that a network must know: trees may reach past the last one that counts; see
    `block_table_width`.
    """
    return _choose_max_model_len(config, model) + 2 * MAX_NODES


def load_target(
    folder: Path,
    model: ModelConfig,
    taps: tuple[int, ...],
    num_positions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LlamaForCausalLM:
    """Return the target of `folder` on `device`, frozen; every stored tensor is checked."""
    target = LlamaForCausalLM(model, taps, num_positions=num_positions, dtype=dtype).to(device)
    target.requires_grad_(False)
    mapping = llama_mapping(
        num_layers=model.num_layers,
        query_size=model.query_size,
        kv_size=model.kv_size,
        intermediate_size=model.intermediate_size,
        tie_word_embeddings=model.tie_word_embeddings,
        attention_bias=model.attention_bias,
        mlp_bias=model.mlp_bias,
    )
    load_into(target, open_weights(folder), mapping)
    return target.eval()


def build_library(config: EngineConfig, draft: LoadedDraft | None) -> TreeLibrary:
    """Return the trees of this engine: those shipped with the draft, or searched ones; none without a draft.

    A tree of depth D needs the features of D + 1 positions at once, which the window must hold. Raises
    `ConfigError` for a tree with more siblings than the draft has tokens.
    """
    if draft is None:
        return TreeLibrary((), max_depth=0)
    max_depth = config.speculation.feature_window - 1
    if draft.trees is None:
        library = TreeLibrary.search(max_depth=max_depth)
    else:
        library = TreeLibrary.load(draft.trees, max_depth=max_depth)
    for name in library.names:
        num_siblings = library.get(name).max_rank + 1
        if num_siblings > draft.config.draft_vocab_size:
            raise ConfigError(
                f"{name} has nodes of {num_siblings} children, but the draft has "
                f"{draft.config.draft_vocab_size} tokens: ship trees that are narrower"
            )
    return library


def create_drafter(head: DraftNetwork, backend: AttentionBackend, shape: RunnerShape) -> GuardedDrafter:
    """Return a drafter for `head` with its own pages, on the head's device; another head may follow it."""
    config, weight = head.config, head.embed_rows
    kv_shape = (config.num_kv_heads, config.head_dim, shape.kv_dtype, weight.device)
    pool = KVPool(config.num_layers, shape.num_blocks, shape.block_size, *kv_shape)
    ops = choose_draft_ops(weight.device)

    def make(head: DraftNetwork, pool: KVPool) -> Drafter:
        return Drafter(head, pool, backend, shape.block_size, ops)

    return GuardedDrafter(make, head, pool)


def _choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len or model.max_position
    if wanted > model.max_position:
        raise ConfigError(
            f"max_model_len {wanted} is beyond the {model.max_position} positions that the model was made for"
        )
    return wanted
