"""Texts to load a server with, by class: acceptance of drafts depends on what is asked.

All were written for this project and are under its license. Turning them into tokens is left to the server.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_NOTICE = (
    "The swimming hall on Mill Street closes from Monday to the end of the month. The pumps are thirty "
    "years old and one of them failed twice in spring. Season tickets are extended by four weeks without a "
    "form. School classes swim in the northern hall, and a bus leaves the town square at eight. The cafe "
    "stays open."
)
_LETTER = (
    "Dear neighbours, the lift in staircase B has stood still since Friday. A part has to come from the "
    "maker, who says it takes nine working days. Until then the caretaker carries shopping up every evening "
    "between six and seven; ring the bell marked Desk. We are sorry for the trouble and thank you for your "
    "patience."
)
_LOG = (
    "Day 3: wind from the west, calm sea. We mended the small sail and found that the water barrel leaks. "
    "Day 4: fog until noon, then rain; forty litres caught in the awning. Day 5: a ship on the horizon, no "
    "answer to our signals. Day 6: clear sky, 80 miles by the log, everyone well and the barrel sealed."
)

CLASSES: Mapping[str, tuple[str, ...]] = {
    "chat": (
        "I have two free days in a small coastal town in autumn. What could I do there?",
        "My friend forgot my birthday. How can I tell her that it hurt without starting a quarrel?",
        "Explain what an interest rate is to somebody who has never had a bank account.",
        "Which plants survive in a dark hallway, and how often do they want water?",
        "Tell me a bedtime story about a snail that wants to win a race.",
        "What is a good way to learn the names of thirty new pupils in a week?",
    ),
    "code": (
        "Write a Python function that merges two sorted lists into one sorted list, with a docstring.",
        "Write a shell command that prints the ten largest files below the current folder.",
        "Write a SQL query for the average order value per month of the last year.",
        "Write a Python class for a stack with push, pop and peek, and three unit tests for it.",
        "Write a JavaScript function that debounces another function, and show how it is called.",
        "Explain what this does and mend it: for i in range(len(xs)): xs.remove(xs[i])",
    ),
    "math": (
        "A tank holds 840 litres. One pipe fills it in 6 hours, another empties it in 10. When is it full?",
        "What is 17 percent of 2,350? Show each step.",
        "Three friends share a bill of 86.40 so that one pays twice as much as each other. Who pays what?",
        "The sides of a rectangle are in the ratio 3 to 5 and its perimeter is 64 cm. Find its area.",
        "How many different words can be made from the letters of LEVEL?",
        "A train goes 150 km at 100 km/h and returns at 60 km/h. What is its average speed?",
    ),
    "summary": (
        f"Summarise in two sentences:\n\n{_NOTICE}",
        f"List the three facts that a tenant must know:\n\n{_LETTER}",
        f"Write a headline and one sentence about this log:\n\n{_LOG}",
        f"What changes for families with children?\n\n{_NOTICE}",
        f"Put the events in order, one line each:\n\n{_LOG}",
    ),
    "rewrite": (
        f"Rewrite as a short, friendly message for a notice board:\n\n{_LETTER}",
        f"Translate into French:\n\n{_NOTICE}",
        f"Repeat the text with every number written as a word:\n\n{_LOG}",
        f"Rewrite in the past tense:\n\n{_NOTICE}",
        f"Turn this into a list of bullet points:\n\n{_LETTER}",
    ),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text of a class."""

    prompt_class: str
    idx: int
    text: str


def cycle(classes: Sequence[str], start: int = 0) -> Iterator[Prompt]:
    """Yield the prompts of the classes for ever, class by class in turn, from the `start`-th on.

    Raises `KeyError` for an unknown class.
    """
    rounds = max(len(CLASSES[name]) for name in classes)
    prompts = [
        Prompt(name, idx, CLASSES[name][idx])
        for idx in range(rounds)
        for name in classes
        if idx < len(CLASSES[name])
    ]
    return itertools.islice(itertools.cycle(prompts), start % len(prompts), None)
