"""Records which rank of the draft's distribution each token of real answers had, root by root.

A file of them replays any tree exactly (temperature 0): see `dispatcher_world`. Run:
python -m benchmarks.record_ranks OUT.json [--tokens N]
"""

import argparse
import json
from pathlib import Path

import torch

from app.bench_prompts import QUESTIONS
from app.call import Message
from app.local_model import LocalModel
from app.offline import run_to_end
from engine import EngineConfig, Request, SamplingParams
from engine.batch import NUM_RANKS
from engine.draft.loader import load_draft
from engine.model.config import ModelConfig
from engine.runner.worker import load_target
from engine.training.dataset import Conversations
from engine.training.evaluate import measure_ranks

DEPTH = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=160, help="tokens per answer")
    options = parser.parse_args()
    model = LocalModel.open(EngineConfig(Path(), max_num_seqs=len(QUESTIONS)), "smollm2", "auto")
    prompts = [model.encode_chat([Message("user", question)]) for question in QUESTIONS]
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens)
    requests = [Request(str(idx), prompt, params) for idx, prompt in enumerate(prompts)]
    completions = run_to_end(model.engine(), requests)
    answers = [completion.token_ids for completion in completions]
    ranks = _ranks(model, prompts, answers)
    record = {
        "model": "SmolLM2-135M-Instruct",
        "about": "rank of token i + d after the draft read up to i + d - 1, one digit per depth d; 8 is none",
        "answers": ["".join(str(rank) for row in answer for rank in row) for answer in ranks],
        "depth": DEPTH,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _ranks(
    model: LocalModel, prompts: list[tuple[int, ...]], answers: list[tuple[int, ...]]
) -> list[list[list[int]]]:
    """Return ranks [token][depth] of each answer by teacher forcing."""
    config = ModelConfig.load(model.config.model)
    assert model.config.draft is not None
    draft = load_draft(model.config.draft)
    cpu = torch.device("cpu")
    target = load_target(model.config.model, config, draft.config.taps, 2048, torch.float32, cpu)
    head = draft.build(target.embed_tokens.weight, target.head_weight, 2048, torch.float32, cpu)
    texts = [(*prompt, *answer) for prompt, answer in zip(prompts, answers, strict=True)]
    conversations = Conversations(
        token_ids=torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        is_answer=torch.tensor(
            [
                idx >= len(prompt)
                for prompt, text in zip(prompts, texts, strict=True)
                for idx in range(len(text))
            ]
        ),
        lengths=torch.tensor([len(text) for text in texts]),
    )
    found = measure_ranks(target, head, conversations, DEPTH, batch_tokens=2048)
    return [answer.clamp(max=NUM_RANKS).tolist() for answer in found]


if __name__ == "__main__":
    main()
