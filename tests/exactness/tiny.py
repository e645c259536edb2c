"""A tiny random target and the engines built on it. What drafts it is given is left to `oracle`."""

from dataclasses import dataclass, field

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.registry import create_backend
from engine.batch import SequenceDelta
from engine.config import EngineConfig, SpeculationConfig
from engine.draft.drafter import TreeDrafter
from engine.engine import Engine, assemble_engine
from engine.kvcache.kv_cache import block_table_width
from engine.model.config import ModelConfig
from engine.model.llama import LlamaForCausalLM
from engine.request import Request, SamplingParams
from engine.runner.runner import ModelRunner, RunnerShape
from engine.runner.worker import Worker, choose_slot_ops
from engine.stats import EngineFacts
from engine.tree.library import TreeLibrary

VOCAB = 96
EOS = 5
MAX_LEN = 256
TAPS = (0, 1, 2)

CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position=MAX_LEN,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    bos_token_id=1,
    eos_token_ids=(EOS,),
    dtype="float32",
)


def build_target(seed: int = 0, config: ModelConfig = CONFIG) -> LlamaForCausalLM:
    """Return a target whose next tokens depend on the whole prefix and seldom tie."""
    torch.manual_seed(seed)
    target = LlamaForCausalLM(config, TAPS, num_positions=MAX_LEN + 128, dtype=torch.float32)
    for parameter in target.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 * 1.5)
    torch.nn.init.normal_(target.embed_tokens.weight, std=1.0)
    return target.requires_grad_(False).eval()


@dataclass(frozen=True)
class EngineShape:
    """How one test engine is cut."""

    mode: str = "off"
    block_size: int = 4
    num_blocks: int = 400
    max_num_seqs: int = 8
    max_num_waiting: int = 1024
    max_batched_tokens: int = 256
    enable_prefix_cache: bool = True
    feature_window: int = 16
    draft_mode: str = "greedy"
    table: tuple[tuple[int, str], ...] = field(default=())


def exact_backend(device: torch.device) -> AttentionBackend:
    """Return the backend whose float32 is exact enough for law 1 on `device`."""
    return create_backend("cpu" if device.type == "cpu" else "reference", device)


def build_engine(
    target: LlamaForCausalLM,
    drafter: TreeDrafter | None,
    shape: EngineShape,
    runner_type: type = ModelRunner,
    backend: AttentionBackend | None = None,
) -> Engine:
    """Return an engine over `target` that drafts with `drafter`."""
    speculation = SpeculationConfig(
        mode=shape.mode, table=shape.table, draft_mode=shape.draft_mode, feature_window=shape.feature_window
    )
    config = EngineConfig(
        model="tiny",
        block_size=shape.block_size,
        max_num_seqs=shape.max_num_seqs,
        max_num_waiting=shape.max_num_waiting,
        max_batched_tokens=shape.max_batched_tokens,
        enable_prefix_cache=shape.enable_prefix_cache,
        speculation=speculation,
    )
    library = TreeLibrary.search(max_depth=shape.feature_window - 1 if drafter else 0)
    device = target.embed_tokens.weight.device
    backend = backend or exact_backend(device)
    sizes = runner_shape(shape, library.max_depth)
    runner = runner_type(target, drafter, backend, sizes, (EOS,), slot_ops=choose_slot_ops(device))
    facts = EngineFacts(
        model_name="tiny",
        model_folder="",
        model_digest="",
        draft_digest=None,
        dtype="float32",
        device="cpu",
        attention_backend=backend.name,
        num_threads=1,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        max_model_len=MAX_LEN,
        max_batched_tokens=shape.max_batched_tokens,
        max_num_seqs=shape.max_num_seqs,
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        trees=library.names,
    )
    return assemble_engine(config, Worker(runner, library, facts))


def runner_shape(shape: EngineShape, max_depth: int) -> RunnerShape:
    """Return the sizes of the runner of such an engine."""
    return RunnerShape(
        max_num_seqs=shape.max_num_seqs,
        num_blocks=shape.num_blocks + 1,
        block_size=shape.block_size,
        table_width=block_table_width(MAX_LEN, max_depth, shape.block_size),
        feature_window=shape.feature_window,
        draft_mode=shape.draft_mode,
        kv_dtype=torch.float32,
    )


def run(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    """Run requests to their end and check that every block came back; return the tokens of each."""
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            collect(outputs, delta)
    stats = engine.stats()
    assert stats.num_held_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == engine.facts.num_blocks
    return {request_id: tuple(tokens) for request_id, tokens in outputs.items()}


def collect(outputs: dict[str, list[int]], delta: SequenceDelta) -> None:
    assert delta.message is None, delta.message
    outputs[delta.request_id] += delta.token_ids


def prompts(num: int, length: int = 9, shared: int = 0, seed: int = 0) -> list[tuple[int, ...]]:
    """Return random prompts of rising length that begin with the same `shared` tokens."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(6, VOCAB, (shared,), generator=generator).tolist()
    return [
        (*common, *torch.randint(6, VOCAB, (max(1, length + 3 * idx),), generator=generator).tolist())
        for idx in range(num)
    ]


def request_of(name: str, prompt: tuple[int, ...], seed: int, **sampling: object) -> Request:
    """Return a request whose seed also names its sequence to an oracle."""
    params: dict[str, object] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling}
    return Request(name, prompt, SamplingParams(seed=seed, **params))
