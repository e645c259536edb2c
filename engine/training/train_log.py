"""What a training run tells while it runs: a progress bar, `log.jsonl`, and TensorBoard events.

What a step measures is left to `trainer`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from engine.training.event_file import EventFile

LOG = "log.jsonl"
Entry = Mapping[str, Any]  # plain JSON values by name; `step` is among them


class TrainingLog:
    """The log of one run in `folder`, going on after `step`: entries of steps that were lost are dropped.

    A process that is not the first of its group passes no folder and logs nothing. A context manager.
    """

    def __init__(self, folder: Path | None, step: int, num_steps: int) -> None:
        from tqdm import tqdm

        self._folder = folder
        self._bar = tqdm(total=num_steps, initial=step, desc="train", disable=None if folder else True)
        self._events = None
        if folder is not None:
            _drop_lost(folder / LOG, step)
            self._events = EventFile(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()
        if self._events is not None:
            self._events.close()

    def advance(self) -> None:
        """Move the bar by one step."""
        self._bar.update()

    def write(self, entry: Entry) -> None:
        """Log one entry and show its loss."""
        if self._folder is None or self._events is None:
            return
        with (self._folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self._events.write(int(entry["step"]), dict(_scalars(entry)))
        self._bar.set_postfix(loss=f"{entry['loss']:.4f}", accepted=entry["acceptance"][0])


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a training folder, oldest first; none where nothing was logged."""
    path = folder / LOG
    if not path.is_file():
        return []
    # A killed run may have left half a line.
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _drop_lost(path: Path, step: int) -> None:
    """Keep the entries up to `step` only: a resumed run will write the later ones again."""
    kept = [entry for entry in read_log(path.parent) if entry["step"] <= step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
    temporary.replace(path)


def _scalars(entry: Entry) -> list[tuple[str, float]]:
    """Return the numbers of an entry by tag; those of a list are numbered by depth, from 1."""
    scalars = []
    for name, value in entry.items():
        if isinstance(value, list):
            scalars += [(f"{name}/depth_{depth}", float(item)) for depth, item in enumerate(value, start=1)]
        elif name != "step":
            scalars.append((name, float(value)))
    return scalars
