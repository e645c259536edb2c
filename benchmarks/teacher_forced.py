"""Compares the fast path on a GPU with float32, token by token along the model's own answers.

It answers prompts by plain decoding, then runs the answers again with every position given: in 16 bits as the
engine's captured trees would, and in float32 on the reference backend. It also lets the GPU and the CPU
answer in float32. Run: python benchmarks/teacher_forced.py MODEL_FOLDER PROMPTS.jsonl --json FILE
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

# Run by its path, Python looks for modules beside this file only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from app.local_model import LocalModel
from app.machine import describe_machine
from app.offline import run_to_end
from app.prompt_file import read_chats
from engine import Engine, EngineConfig, NearTies, Request, SamplingParams, SpeculationConfig
from engine.attention.backend import AttentionLayout, PrefillLayout
from engine.attention.registry import create_backend
from engine.kvcache.kv_pool import KVPool
from engine.layers.rotary import Angles, rotate_qkv
from engine.model.config import ModelConfig
from engine.model.llama import LlamaForCausalLM
from engine.runner.worker import load_target, use_kernels

BLOCK_SIZE = 64
Text = tuple[int, ...]


class FastPath:
    """A target on the kernels of a GPU: prompts as chunks, then `num_nodes` given tokens a step as a chain
    that one captured graph verifies for every row.
    """

    def __init__(self, target: LlamaForCausalLM, num_rows: int, length: int, num_nodes: int) -> None:
        config, self._device = target.config, target.embed_tokens.weight.device
        use_kernels(target, None, self._device)
        self._target, self._backend = target, create_backend("triton", self._device)
        width = -(-length // BLOCK_SIZE)
        kv_shape = (config.num_kv_heads, config.head_dim, target.embed_tokens.weight.dtype, self._device)
        self._pool = KVPool(config.num_layers, num_rows * width + 1, BLOCK_SIZE, *kv_shape)
        # Scattered, as pages come to be.
        pages = torch.randperm(num_rows * width, device=self._device) + 1
        self._tables = pages.view(num_rows, width)
        self._tokens = torch.zeros(num_rows, num_nodes, dtype=torch.int64, device=self._device)
        self._roots = torch.ones(num_rows, dtype=torch.int64, device=self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)

    def logits(self, texts: Sequence[Text], lens: Sequence[int]) -> list[Tensor]:
        """Return logits [n, V] of every text: after each token from the last of its prompt on, `lens` long,
        but the last of all.
        """
        self._prefill([text[: size - 1] for text, size in zip(texts, lens, strict=True)])
        num_nodes = self._tokens.shape[1]
        num_steps = max(len(text) - size for text, size in zip(texts, lens, strict=True))
        found: list[list[Tensor]] = [[] for _ in texts]
        for first in range(0, num_steps, num_nodes):
            starts = [size - 1 + first for size in lens]
            rows = [
                [text[min(start + node, len(text) - 1)] for node in range(num_nodes)]
                for text, start in zip(texts, starts, strict=True)
            ]
            self._tokens.copy_(torch.tensor(rows))
            self._roots.copy_(torch.tensor(starts))
            step = self._replay()
            for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
                found[row].append(step[row, : max(0, len(text) - 1 - start)].clone())
        return [torch.cat(parts) for parts in found]

    def _replay(self) -> Tensor:
        if self._graph is None:
            self._step()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits = self._step()
        self._graph.replay()
        return self._logits

    def _step(self) -> Tensor:
        """Return logits [B, N, V] of the tokens at hand and commit their K/V."""
        num_rows, num_nodes = self._tokens.shape
        offsets = torch.arange(num_nodes, device=self._device)
        positions = self._roots[:, None] + offsets
        window = self._roots[:, None].expand(num_rows, num_nodes)
        causal = (offsets[:, None] >= offsets).expand(num_rows, -1, -1)
        layout = AttentionLayout(self._tables, torch.zeros_like(window), window, causal)
        attend_pages = self._backend.bind(layout, BLOCK_SIZE)
        scratch = self._pool.scratch(num_rows * num_nodes)
        layers = scratch.layers(num_rows)

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            k_dest, v_dest, k, v = layers[layer_idx]
            q = self._target.ops.rope_store(qkv, angles, k_dest, v_dest)
            q = q.view(num_rows, num_nodes, *q.shape[1:])
            return attend_pages(q, k, v, *self._pool.layers[layer_idx]).flatten(0, 1)

        hidden = self._target(self._tokens.flatten(), positions.flatten(), attend).hidden
        blocks = (positions // BLOCK_SIZE).clamp(max=self._tables.shape[1] - 1)
        slots = self._tables.gather(1, blocks) * BLOCK_SIZE + positions % BLOCK_SIZE
        self._pool.commit(slots.flatten(), scratch)
        return self._target.logits(hidden).view(num_rows, num_nodes, -1)

    def _prefill(self, prompts: Sequence[Text]) -> None:
        lens = tuple(map(len, prompts))
        sizes = torch.tensor(lens, device=self._device)
        zeros = torch.zeros_like(sizes)
        cu_seqlens = torch.cat((zeros[:1], sizes.cumsum(0)))
        layout = PrefillLayout(self._tables, cu_seqlens, zeros, zeros, lens)
        attend_chunks = self._backend.bind_prefill(layout, BLOCK_SIZE)
        positions = torch.cat([torch.arange(size) for size in lens]).to(self._device)
        owner = torch.arange(len(lens), device=self._device).repeat_interleave(sizes)
        slots = self._tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

        def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
            q = self._target.ops.rope_store(qkv, angles, *self._pool.rows(layer_idx), slots)
            return attend_chunks(q, *self._pool.layers[layer_idx])

        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self._device)
        self._target(tokens, positions, attend)


def reference_logits(target: LlamaForCausalLM, text: Text, prompt_len: int) -> Tensor:
    """Return logits [n, V] of one text in one pass of torch operations, as `FastPath.logits` orders them."""
    config, device = target.config, target.embed_tokens.weight.device
    size = len(text) - 1
    window = torch.zeros(1, size, dtype=torch.int64, device=device)
    causal = torch.ones(1, size, size, dtype=torch.bool, device=device).tril()
    layout = AttentionLayout(window[:, :0], window, window, causal)
    attend_pages = create_backend("reference", device).bind(layout, 1)
    shape = (1, 1, config.num_kv_heads, config.head_dim)
    no_pages = torch.zeros(shape, dtype=target.embed_tokens.weight.dtype, device=device)

    def attend(layer_idx: int, qkv: Tensor, angles: Angles) -> Tensor:
        del layer_idx  # nothing is cached, so every layer attends alike
        q, k, v = rotate_qkv(qkv, angles, config.num_kv_heads)
        return attend_pages(q[None], k[None], v[None], no_pages, no_pages)[0]

    tokens = torch.tensor(text[:-1], device=device)
    hidden = target(tokens, torch.arange(size, device=device), attend).hidden
    return target.logits(hidden[prompt_len - 1 :])


def compare(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Say where the best token of logits [n, V] is not that of float32, and how near the best two of those
    are there.
    """
    best, order = found.float().argmax(-1), exact.topk(2, -1)
    differs = best != order.indices[:, 0]
    top_two = (order.values[:, 0] - order.values[:, 1])[differs]
    chosen = (order.values[:, 0] - exact.gather(1, best[:, None])[:, 0])[differs]
    return {
        "positions": len(best),
        "differs": int(differs.sum()),
        "share": float(differs.float().mean()),
        "largest_top_two_gap": float(top_two.max()) if len(top_two) else 0.0,
        "largest_gap_to_chosen": float(chosen.max()) if len(chosen) else 0.0,
        "relative_l2": float((found.float() - exact).norm() / exact.norm()),
    }


def answers(
    folder: Path, prompts: Sequence[Text], max_tokens: int, **config: object
) -> tuple[Engine, list[Text]]:
    """Return the engine and its greedy answers."""
    sizes = {"max_num_seqs": len(prompts), "enable_prefix_cache": False, "max_batched_tokens": 8192}
    engine = Engine.load(EngineConfig(folder, **{**sizes, **config}))  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    requests = [Request(f"row-{row}", prompt, sampling) for row, prompt in enumerate(prompts)]
    return engine, [one.token_ids for one in run_to_end(engine, requests)]


def compare_forced(folder: Path, prompts: Sequence[Text], options: argparse.Namespace) -> dict[str, object]:
    """Run the plain answers of the fast path again, and print how its best tokens compare."""
    device = torch.device("cuda")
    engine, said = answers(folder, prompts, options.tokens, dtype="bfloat16", device="cuda")
    environment = describe_machine(engine.facts)
    del engine
    texts = [(*prompt, *answer) for prompt, answer in zip(prompts, said, strict=True)]
    lens, model = [len(prompt) for prompt in prompts], ModelConfig.load(folder)
    num_positions = max(map(len, texts)) + 64
    target = {
        dtype: load_target(folder, model, (), num_positions, dtype, device)
        for dtype in (torch.float32, torch.bfloat16)
    }
    exact, plain = (
        torch.cat([reference_logits(target[dtype], *pair).float() for pair in zip(texts, lens, strict=True)])
        for dtype in (torch.float32, torch.bfloat16)
    )
    results: dict[str, object] = {"environment": environment}
    results["reference bfloat16 against float32"] = compare(plain, exact)
    for num_nodes in options.nodes:
        fast = FastPath(target[torch.bfloat16], len(texts), num_positions, num_nodes)
        logits = torch.cat(fast.logits(texts, lens))
        results[f"fast bfloat16, {num_nodes} nodes, against float32"] = compare(logits, exact)
        results[f"fast bfloat16, {num_nodes} nodes, against reference bfloat16"] = compare(logits, plain)
    for name, values in results.items():
        print(f"{name}: {values}", flush=True)
    return results


def compare_devices(folder: Path, prompts: Sequence[Text], options: argparse.Namespace) -> dict[str, object]:
    """Let GPU and CPU answer in float32 on the reference backend, the GPU by trees, too."""
    fixed = {"dtype": "float32", "attention_backend": "reference"}
    _, on_cpu = answers(folder, prompts, options.float32_tokens, device="cpu", num_threads=8, **fixed)
    results: dict[str, object] = {}
    ways = {"plain": None, options.tree: options.draft}
    for name, draft in ways.items():
        speculation = SpeculationConfig(mode=name if draft else "off")
        engine, on_gpu = answers(
            folder,
            prompts,
            options.float32_tokens,
            device="cuda",
            draft=draft,
            speculation=speculation,
            **fixed,
        )
        gaps = []
        for prompt, left, right in zip(prompts, on_cpu, on_gpu, strict=True):
            first = next(
                (i for i, pair in enumerate(zip(left, right, strict=True)) if len({*pair}) > 1), None
            )
            if first is not None:
                gaps.append(NearTies(folder).gap((*prompt, *left[:first]), left[first], right[first]))
        identical = len(prompts) - len(gaps)
        found = {"answers": len(prompts), "identical": identical, "gaps": gaps}
        results[name] = {**found, "tokens_per_call": engine.stats().tokens_per_call}
        print(f"float32, GPU {name} against CPU plain: {results[name]}", flush=True)
    return results


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path, help="JSONL with turns, prompt or messages")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--float32-tokens", type=int, default=48)
    parser.add_argument("--float32-prompts", type=int, default=40, help="0 leaves the CPU out")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--draft", type=Path, help="folder of the draft for the float32 trees")
    parser.add_argument("--tree", default="tree-8")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = LocalModel.open(EngineConfig(options.model), str(options.model), "none")
    prompts = [model.encode_chat(chat.first_turn) for chat in read_chats(options.prompts)]
    results = {"forced": compare_forced(options.model, prompts, options)}
    if options.float32_prompts:
        results["devices"] = compare_devices(options.model, prompts[: options.float32_prompts], options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
