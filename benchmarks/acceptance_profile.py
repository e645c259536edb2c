"""Counts which rank the target's next token has among a draft's, by depth, along the answers to prompts.

The answers are greedy, so the counts say what any tree would accept. Run:
python benchmarks/acceptance_profile.py --prompts FILE --source "of whom" --out benchmarks/profiles/NAME.json
"""

import argparse
import sys
from pathlib import Path

import torch

# Run by its path, Python looks for modules beside this file only.
sys.path.insert(0, str(Path(__file__).parents[1]))

from app.local_model import LocalModel
from app.offline import run_to_end
from app.prompt_file import read_chats
from engine import EngineConfig, MeasuredProfile, Request, SamplingParams
from engine.draft.loader import load_draft
from engine.model.config import ModelConfig
from engine.runner.calibrate import DTYPES
from engine.runner.worker import load_target
from engine.training.dataset import Conversations
from engine.training.evaluate import AcceptanceProfile, measure_ranks


def answer(model: LocalModel, prompts: list[tuple[int, ...]], max_tokens: int) -> Conversations:
    """Return every prompt with its greedy answer."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, speculation="off")
    requests = [Request(f"prompt-{idx}", prompt, sampling) for idx, prompt in enumerate(prompts)]
    completions = run_to_end(model.engine(), requests)
    texts = [(*p, *c.token_ids) for p, c in zip(prompts, completions, strict=True)]
    return Conversations(
        torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        torch.cat([torch.arange(len(t)) >= len(p) for t, p in zip(texts, prompts, strict=True)]),
        torch.tensor([len(text) for text in texts]),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with turns, prompt or messages")
    parser.add_argument("--source", required=True, help="what the prompts are, for the file")
    parser.add_argument("--limit", type=int, help="use the first N prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=12)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    sizes = EngineConfig(
        Path(options.model), dtype=options.dtype, device=options.device, max_num_waiting=1 << 20
    )
    model = LocalModel.open(sizes, options.model, options.draft)
    if model.config.draft is None:
        parser.error("no draft is shipped for this model: name its folder with --draft")
    prompts = [model.encode_chat(chat.first_turn) for chat in read_chats(options.prompts, options.limit)]
    conversations = answer(model, prompts, options.max_tokens)
    config, draft = ModelConfig.load(model.config.model), load_draft(model.config.draft)
    num_positions = int(conversations.lengths.max()) + options.depth
    kind = (num_positions, DTYPES[options.dtype], torch.device(options.device))
    target = load_target(model.config.model, config, draft.config.taps, *kind)
    head = draft.build(target.embed_tokens.weight, target.head_weight, *kind)
    answers = measure_ranks(target, head, conversations, options.depth)
    profile = AcceptanceProfile.measure(answers, options.ranks)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    source = (
        f"{options.source}: {len(prompts)} prompts, greedy answers of at most {options.max_tokens} tokens; "
        f"draft {draft.digest[:12]}"
    )
    MeasuredProfile(source, profile.probabilities).save(
        options.out, {"counts": profile.counts, "totals": profile.totals}
    )
    print(
        f"{options.out}: {profile.totals[0]} roots, first ranks {[row[0] for row in profile.probabilities]}"
    )


if __name__ == "__main__":
    main()
