"""Training data that the target writes itself: turns of the user and answers, wave after wave, into shards.

Decoding is left to the engine, the exchange of turns to `dialogue`, text to the caller.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ConfigError, ModelLoadError
from engine.request import SamplingParams
from engine.training.data_card import DataCard
from engine.training.dataset import load_conversations, shard_path, shard_paths, write_shard
from engine.training.dialogue import Dialogue, Span, StepEngine, TurnFrame, write_dialogues
from engine.weights.json_object import read_json_object

PROGRESS = "progress.json"
_GRAM = 16
_MAX_USES_OF_TURN = 2  # conversations that may begin with the same turn of the user


@dataclass(frozen=True, slots=True)
class SynthSettings:
    """How dialogues are made. An answer has one of `temperatures`, drawn per answer with equal chance.

    Turns of the user are sampled at `user_temperature`; a first turn begins with one of the caller's openings
    with chance `opening_share`. After each answer the dialogue goes on with chance `turn_share`. No more than
    `max_length` tokens in all; a wave of `wave_size` dialogues becomes one shard.
    """

    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.6, 0.7, 0.8, 1.0)
    min_p: float = 0.02
    user_temperature: float = 1.0
    opening_share: float = 0.6
    turn_share: float = 0.45
    max_turns: int = 8
    max_user_tokens: int = 256
    max_answer_tokens: int = 512
    max_length: int = 1024
    wave_size: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ConfigError("temperatures must name at least one temperature")
        for temperature in (*self.temperatures, self.user_temperature):
            SamplingParams(temperature=temperature, min_p=self.min_p)
        for name in ("max_turns", "max_user_tokens", "max_answer_tokens", "max_length", "wave_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        for name in ("opening_share", "turn_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must lie in [0, 1], found {getattr(self, name)}")


@dataclass(slots=True)
class SynthCounts:
    """What became of the dialogues; written by `SynthRun` only."""

    num_kept: int = 0
    num_tokens: int = 0
    num_answer_tokens: int = 0
    num_unanswered: int = 0
    num_repeated: int = 0
    num_looped: int = 0


def plan_invented(frame: TurnFrame, settings: SynthSettings, dialogue_idx: int) -> list[Span]:
    """Return the spans of a dialogue whose every turn the target writes; a function of its arguments."""
    rng = random.Random(f"{settings.seed} {dialogue_idx}")  # noqa: S311 - nothing here is secret
    spans: list[Span] = []
    given = frame.opening
    if frame.beginnings and rng.random() < settings.opening_share:
        given += rng.choice(frame.beginnings)
    for _ in range(settings.max_turns):
        user = SamplingParams(
            temperature=settings.user_temperature,
            min_p=settings.min_p,
            max_tokens=settings.max_user_tokens,
            stop_token_ids=frame.answer_opening[:1],
            seed=rng.getrandbits(63),
        )
        spans.append(Span(given, is_answer=False, sampling=user))
        spans.append(Span(frame.answer_opening, is_answer=True, sampling=_answer_sampling(settings, rng)))
        given = frame.user_opening
        if rng.random() >= settings.turn_share:
            break
    return spans


def plan_given(turns: Sequence[tuple[int, ...]], settings: SynthSettings, dialogue_idx: int) -> list[Span]:
    """Return the spans of a dialogue whose user says `turns`, each with the frame around it."""
    rng = random.Random(f"{settings.seed} {dialogue_idx}")  # noqa: S311 - nothing here is secret
    return [Span(given, is_answer=True, sampling=_answer_sampling(settings, rng)) for given in turns]


def _answer_sampling(settings: SynthSettings, rng: random.Random) -> SamplingParams:
    temperature = rng.choice(settings.temperatures)
    return SamplingParams(
        temperature=temperature,
        min_p=settings.min_p if temperature > 0 else 0.0,
        max_tokens=settings.max_answer_tokens,
        seed=rng.getrandbits(63),
    )


class SynthRun:
    """Writes `num_dialogues` dialogues of `plan` (by index) into `folder`, going on where it was stopped.

    A wave appears as one shard, whole or not at all, and a killed run repeats at most its open wave. Dropped
    are dialogues without an answer, exact repetitions, and third and later uses of one first turn; a dialogue
    that falls into a loop is cut there.
    """

    def __init__(
        self,
        folder: Path,
        card: DataCard,
        settings: SynthSettings,
        plan: Callable[[int], Sequence[Span]],
        num_dialogues: int,
    ) -> None:
        self.folder = folder
        self.counts = SynthCounts()
        self._settings = settings
        self._plan = plan
        self._num_dialogues = num_dialogues
        self._next_idx = 0
        self._uses: Counter[tuple[int, ...]] = Counter()
        self._seen: set[tuple[int, ...]] = set()
        self._resume(card)

    @property
    def is_done(self) -> bool:
        """True once every dialogue has been written or dropped."""
        return self._next_idx >= self._num_dialogues

    @property
    def num_written(self) -> int:
        """The number of dialogues written or dropped."""
        return self._next_idx

    def write_wave(self, engine: StepEngine) -> int:
        """Write the next wave and return how many dialogues it had. Passes `OSError` on."""
        stop = min(self._next_idx + self._settings.wave_size, self._num_dialogues)
        plans = [self._plan(idx) for idx in range(self._next_idx, stop)]
        dialogues = dict(write_dialogues(engine, plans, self._settings.max_length))
        kept = [dialogue for idx in range(len(plans)) if (dialogue := self._keep(dialogues[idx])) is not None]
        if kept:
            # Named by its first dialogue, so that a wave that is written again takes its own place.
            write_shard(shard_path(self.folder, self._next_idx), [_as_tensors(dialogue) for dialogue in kept])
        self._next_idx = stop
        self._save()
        return len(plans)

    def _keep(self, dialogue: Dialogue) -> Dialogue | None:
        """Return the part of a dialogue that is worth training on, or None, and count it."""
        end = find_loop(dialogue.token_ids)
        self.counts.num_looped += end < len(dialogue.token_ids)
        kept = Dialogue(dialogue.token_ids[:end], dialogue.is_answer[:end], dialogue.answers)
        if not any(kept.is_answer):
            self.counts.num_unanswered += 1
            return None
        first_turn = kept.token_ids[: kept.is_answer.index(True)]
        if kept.token_ids in self._seen or self._uses[first_turn] >= _MAX_USES_OF_TURN:
            self.counts.num_repeated += 1
            return None
        self._remember(kept.token_ids, first_turn)
        self.counts.num_kept += 1
        self.counts.num_tokens += len(kept.token_ids)
        self.counts.num_answer_tokens += sum(kept.is_answer)
        return kept

    def _remember(self, token_ids: tuple[int, ...], first_turn: tuple[int, ...]) -> None:
        self._seen.add(token_ids)
        self._uses[first_turn] += 1

    def _resume(self, card: DataCard) -> None:
        """Read what an earlier run has left; its card must be this run's."""
        path = self.folder / PROGRESS
        if not path.is_file():
            if shard_paths(self.folder):
                raise ConfigError(f"{self.folder} holds shards of another kind of data: use a fresh folder")
            card.save(self.folder)
            return
        if DataCard.load(self.folder) != card:
            raise ConfigError(
                f"{self.folder} holds data of another model or with other settings: use a fresh folder"
            )
        match read_json_object(path):
            case {"next_idx": int(next_idx), "counts": dict(counts)} if (
                counts.keys() == asdict(self.counts).keys()
            ):
                self._next_idx, self.counts = next_idx, SynthCounts(**counts)
            case _:
                raise ModelLoadError(f"{path} is damaged: remove the folder and make the data again")
        self._drop_unfinished()
        if shard_paths(self.folder):
            for token_ids, is_answer in load_conversations(self.folder):
                tokens = tuple(token_ids.tolist())
                self._remember(tokens, tokens[: int(is_answer.int().argmax())])

    def _drop_unfinished(self) -> None:
        """Remove the shard of a wave whose end was not recorded: it will be written again."""
        shard_path(self.folder, self._next_idx).unlink(missing_ok=True)

    def _save(self) -> None:
        temporary = self.folder / f".{PROGRESS}.tmp"
        progress = {"next_idx": self._next_idx, "counts": asdict(self.counts)}
        temporary.write_text(json.dumps(progress) + "\n", encoding="utf-8")
        temporary.replace(self.folder / PROGRESS)


def _as_tensors(dialogue: Dialogue) -> tuple[Tensor, Tensor]:
    return torch.tensor(dialogue.token_ids, dtype=torch.int32), torch.tensor(dialogue.is_answer)


def find_loop(token_ids: Sequence[int]) -> int:
    """Return where a degenerate loop begins to repeat itself, else the length.

    A loop is a run of 16 positions whose grams of 16 tokens have all occurred before: 31 tokens again.
    The run's first repeated gram is kept, so that a head still learns to follow one.
    """
    seen: set[tuple[int, ...]] = set()
    run = 0
    for start in range(len(token_ids) - _GRAM + 1):
        gram = tuple(token_ids[start : start + _GRAM])
        run = run + 1 if gram in seen else 0
        if run == _GRAM:
            return start + 1
        seen.add(gram)
    return len(token_ids)
