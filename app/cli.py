"""The `eyas` command: its arguments, and one clear line where it fails.

What a command does is left to its own module, which is imported only when it runs.
"""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from app.options import DTYPES, Commands, add_model, names, non_negative_floats, positive, positive_list
from app.options_training import add_draft, add_eval, add_synth, add_train
from app.options_validate import add_validate
from ops.rollout.options import add_rollout

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what a shell reports


def command() -> int:
    """Run the `eyas` script. A benchmark runs as a serving core does, or its baseline would be weakened."""
    if sys.argv[1:2] == ["bench"]:
        from engine import enter_core_environment

        enter_core_environment()
    return main()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 after an error, 2 for wrong usage, or what a verdict
    of `eyas validate` stands for.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    from engine import EyasError

    try:
        status: int = importlib.import_module(options.module).run(options, sys.stdout)
    except EyasError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`) has what it wanted. What is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eyas", description="Serve Llama-family models with EAGLE tree speculation."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_pull(commands)
    _add_generate(commands)
    _add_bench(commands)
    add_validate(commands)
    add_eval(commands)
    add_synth(commands)
    add_train(commands)
    add_draft(commands)
    add_rollout(commands)
    _add_trees(commands)
    return parser


def _add_serve(commands: Commands) -> None:
    serve = commands.add_parser("serve", help="start an OpenAI-compatible server on this machine")
    serve.set_defaults(module="app.cli_serve")
    serve.add_argument("--config", type=Path, metavar="FILE", help="YAML file; the flags below win over it")
    add_model(serve, model=None, draft=None)
    serve.add_argument("--served-model-name", metavar="NAME", help="what clients ask for")
    serve.add_argument("--host", metavar="HOST")
    serve.add_argument("--port", type=int, metavar="PORT")
    serve.add_argument("--dtype", choices=DTYPES)
    serve.add_argument("--speculation", metavar="MODE", help="auto, off, or one tree name")
    serve.add_argument("--max-model-len", type=positive, metavar="N", help="tokens of prompt and answer")
    serve.add_argument("--max-num-seqs", type=positive, metavar="N", help="answers in flight at once")


def _add_pull(commands: Commands) -> None:
    pull = commands.add_parser("pull", help="fetch a model into the cache and print its folder")
    pull.set_defaults(module="app.cli_pull")
    pull.add_argument("model", help="an alias (smollm2), or hf://org/name")


def _add_generate(commands: Commands) -> None:
    generate = commands.add_parser("generate", help="answer one prompt on the terminal")
    generate.set_defaults(module="app.cli_generate")
    generate.add_argument("prompt")
    add_model(generate)
    generate.add_argument("--max-tokens", type=positive, default=256, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P")
    generate.add_argument("--seed", type=int, metavar="SEED")
    generate.add_argument("--dtype", choices=DTYPES, default="auto")
    generate.add_argument("--speculation", default="auto", metavar="MODE", help="auto, off, or one tree name")
    generate.add_argument("--raw", action="store_true", help="continue the text itself: no chat template")
    generate.add_argument(
        "--show-drafts", action="store_true", help="colour the tokens that were drafted (on a terminal)"
    )


def _add_bench(commands: Commands) -> None:
    bench = commands.add_parser("bench", help="measure speculation against plain decoding")
    bench.set_defaults(module="app.cli_bench")
    add_model(bench)
    bench.add_argument("--batch", type=positive_list, default=(1, 4), metavar="N,N", help="batch sizes")
    bench.add_argument(
        "--context", type=_token_counts, metavar="N,N", help="prompt tokens, 8k for 8192; else as they come"
    )
    bench.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL with turns, prompt or messages")
    bench.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="tokens per answer")
    bench.add_argument("--rounds", type=positive, default=5, metavar="N", help="rounds per batch size")
    bench.add_argument("--tree", type=names, default=("auto",), metavar="T,T", help="auto, or tree names")
    bench.add_argument("--dtype", choices=DTYPES, default="auto")
    bench.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    bench.add_argument("--attention-backend", default="auto", metavar="NAME")
    bench.add_argument("--block-size", type=positive, metavar="N", help="tokens per cache block")
    bench.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_bench_synthetic(bench)


def _add_bench_synthetic(bench: argparse.ArgumentParser) -> None:
    synthetic = bench.add_argument_group("random weights of a published shape, acceptance from a profile")
    synthetic.add_argument("--synthetic", action=_Synthetic, metavar="NAME", help="such as llama-3.1-8b")
    synthetic.add_argument(
        "--tokens-per-call", type=float, default=2.78, metavar="X", help="what a chain of 3 drafts emits"
    )
    synthetic.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="acceptance by depth and rank; else that of the shipped draft",
    )
    synthetic.add_argument(
        "--trees",
        type=_tree_sizes,
        default=((6, 3), (8, 4), (12, 4), (16, 5), (24, 5), (32, 6)),
        metavar="N:D,N:D",
        help="sizes of the trees to search: nodes and most levels of drafts",
    )
    synthetic.add_argument(
        "--temperature",
        type=non_negative_floats,
        default=(0.0,),
        metavar="T,T",
        help="above 0 with top-p 0.9",
    )
    synthetic.add_argument("--seconds", type=float, default=600.0, help="for all cells together")
    synthetic.add_argument("--trace", action="store_true", help="list the kernels of a step in the JSON")
    synthetic.add_argument("--out", type=Path, metavar="FOLDER", help="for JSON and a plot")


class _Synthetic(argparse.Action):
    """Names a synthetic model, and with it the module that measures one: it needs torch alone."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        del parser, option_string
        setattr(namespace, self.dest, values)
        namespace.module = "app.cli_bench_synthetic"


def _add_trees(commands: Commands) -> None:
    trees = commands.add_parser("trees", help="search, draw and compare draft trees; explain a choice")
    trees.set_defaults(module="app.cli_trees")
    kinds = trees.add_subparsers(required=True, metavar="WHAT", dest="what")
    search = kinds.add_parser("search", help="the best trees for an acceptance profile")
    search.add_argument("--nodes", type=positive_list, default=(8, 16, 32, 64), metavar="N,N")
    search.add_argument("--depth", type=positive, default=7, metavar="N", help="most levels of drafts")
    search.add_argument("--out", type=Path, metavar="FILE", help="write them as a draft's trees.json")
    show = kinds.add_parser("show", help="draw trees with the chance that each node is accepted")
    show.add_argument("names", nargs="*", metavar="TREE", help="all trees of the draft by default")
    compare = kinds.add_parser("compare", help="tokens per call, and per second where steps were timed")
    compare.add_argument("names", nargs="*", metavar="TREE", help="all trees of the draft by default")
    compare.add_argument("--latency", type=Path, metavar="FILE", help="a latency table as JSON")
    compare.add_argument("--context", type=positive, default=512, metavar="N", help="cached tokens of a row")
    for kind in (search, show, compare):
        add_model(kind)
        kind.add_argument(
            "--profile", type=Path, metavar="FILE", help="acceptance instead of the draft's own"
        )
    explain = kinds.add_parser("explain", help="why the dispatcher chose its tree")
    explain.add_argument(
        "state",
        metavar="WHERE",
        help="a running server (http://host:port), or a dispatcher's state as a JSON file; - is a pipe",
    )
    explain.add_argument("--key", metavar="KEY", help="an API key, where the server asks for one")


def _token_counts(text: str) -> tuple[int, ...]:
    """Read counts such as 512,8k."""
    return tuple(
        positive(item.removesuffix("k")) * (1024 if item.endswith("k") else 1) for item in names(text)
    )


def _tree_sizes(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (item.partition(":") for item in names(text))
    return tuple((positive(nodes), positive(levels)) for nodes, _, levels in pairs)


if __name__ == "__main__":
    sys.exit(command())
