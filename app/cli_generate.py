"""`eyas generate`: one prompt is answered on the terminal, as its tokens come.

Serving is left to `serve`.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from app.call import Message
from app.local_model import LocalModel, check_length
from app.offline import StepEngine, deltas
from engine import EngineConfig, IncrementalDetokenizer, Request, SamplingParams, SequenceDelta

GREEN = "\x1b[32m"
RESET = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the answer; `is_drafted` where its tokens were accepted drafts."""

    text: str
    is_drafted: bool

    def coloured(self) -> str:
        return f"{GREEN}{self.text}{RESET}" if self.is_drafted else self.text


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Write the answer, and nothing else, to `out`; how fast it came goes to standard error."""
    sampling = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        max_tokens=options.max_tokens,
        speculation=options.speculation,
    )
    sizes = EngineConfig(Path(options.model), dtype=options.dtype, max_num_seqs=1)
    model = LocalModel.open(sizes, options.model, options.draft)
    if options.raw:
        prompt = model.tokenizer.encode(options.prompt, add_special_tokens=True)
    else:
        prompt = model.encode_chat([Message("user", options.prompt)])
    request = Request("generate", prompt, sampling)
    engine = model.engine()
    check_length(len(prompt), options.max_tokens, engine.facts.max_model_len)
    summary = write_answer(engine, request, model, out, options.show_drafts and out.isatty())
    out.write("\n")
    out.flush()  # the answer stands before its summary where both go to one terminal
    sys.stderr.write(f"{summary}\n")
    return 0


def write_answer(
    engine: StepEngine, request: Request, model: LocalModel, out: TextIO, has_colours: bool
) -> str:
    """Write the pieces of an answer as they come and return one line about its speed."""
    detokenizer = IncrementalDetokenizer(model.tokenizer, request.prompt_token_ids)
    num_tokens = num_calls = 0
    engine.add(request)
    start = time.perf_counter()
    for delta in deltas(engine):
        num_tokens += len(delta.token_ids)
        num_calls = delta.num_calls
        out.writelines(
            piece.coloured() if has_colours else piece.text for piece in pieces(detokenizer, delta)
        )
        out.flush()
    out.write(detokenizer.flush())
    seconds = time.perf_counter() - start
    return (
        f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s, "
        f"{num_tokens / max(1, num_calls):.2f} tokens per call"
    )


def pieces(detokenizer: IncrementalDetokenizer, delta: SequenceDelta) -> Iterator[Piece]:
    """Split a step's text into its accepted drafts, which come first, and the target's own token."""
    num_drafted = delta.num_accepted_in_step
    for token_ids, is_drafted in (
        (delta.token_ids[:num_drafted], True),
        (delta.token_ids[num_drafted:], False),
    ):
        if text := detokenizer.append(token_ids):
            yield Piece(text, is_drafted)
