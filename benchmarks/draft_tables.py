"""Prints tables of drafts in Markdown, in the form of arXiv 2508.08192's tables 1 and 2.

    python benchmarks/draft_tables.py lengths NAME=eval.json ...   # of eyas eval --json: heads by length
    python benchmarks/draft_tables.py study study/results.json     # of benchmarks/draft_study.py

For table 2 give `lengths` one report per precision. Measuring is left to those commands.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

CHAINS = ("chain-3", "chain-5", "chain-7")


def main() -> None:
    parser = argparse.ArgumentParser(description="Print tables of drafts.")
    parser.add_argument("kind", choices=("lengths", "study"))
    parser.add_argument("reports", nargs="+", help="NAME=FILE for lengths, FILE for study")
    options = parser.parse_args()
    if options.kind == "lengths":
        pairs = [report.partition("=") for report in options.reports]
        print(lengths_table({name: json.loads(Path(file).read_text()) for name, _, file in pairs}))
    else:
        for report in options.reports:
            print(study_table(json.loads(Path(report).read_text())))


def lengths_table(reports: dict[str, dict[str, Any]]) -> str:
    """Return a row per head and temperature: tokens per call of each chain with its interval."""
    trees = list(CHAINS)
    for report in reports.values():
        trees += [row["tree"] for row in report["evaluations"][0]["trees"] if row["tree"] not in trees]
    lines = table_head(["head", "temperature", "answers", *trees])
    for name, report in reports.items():
        for evaluation in report["evaluations"]:
            rows = {row["tree"]: row for row in evaluation["trees"]}
            cells = [interval(rows.get(tree)) for tree in trees]
            answers = str(evaluation["engine"]["num_answers"])
            lines.append(table_row([name, f"{evaluation['temperature']:g}", answers, *cells]))
    return "\n".join(lines)


def study_table(results: dict[str, Any]) -> str:
    """Return a row per draft of a study."""
    lines = table_head(
        [
            "row",
            "parameters",
            "unique tokens",
            "trained tokens",
            *CHAINS,
            "tree-16",
            "chain-3 at 1",
            "ceiling",
        ]
    )
    for name, result in results.items():
        greedy, sampled = result["temperatures"]["0"], result["temperatures"]["1"]
        training = result["training"]
        lines.append(
            table_row(
                [
                    name,
                    f"{result['parameters'] / 1e6:.1f} M",
                    f"{training['num_unique_tokens'] / 1e6:.1f} M",
                    f"{training['num_trained_tokens'] / 1e6:.1f} M",
                    *(interval(greedy["trees"].get(tree)) for tree in (*CHAINS, "tree-16")),
                    interval(sampled["trees"]["chain-3"]),
                    f"{sampled['ceiling']['chain-3']:.3f}",
                ]
            )
        )
    return "\n".join(lines)


def interval(row: dict[str, Any] | None) -> str:
    """Return tokens per call and the half width of the interval."""
    if row is None or not math.isfinite(row["tokens_per_call"]):
        return ""
    return f"{row['tokens_per_call']:.3f} ± {(row['high'] - row['low']) / 2:.3f}"


def table_head(names: list[str]) -> list[str]:
    return [table_row(names), "|" + "---|" * len(names)]


def table_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
