"""Situations to decide in: built plainly for one rule, or at random for all of them."""

import math
import random

from engine.dispatcher.control import ArmEstimate, Situation


def arm(name, rate, *, seconds=1.0, error=0.0, settled=None, measured=True, least=None):
    """Return an arm of one row that brings `rate` tokens per second, in steps of `seconds`."""
    tokens = rate * seconds
    return ArmEstimate(
        name=name,
        batch=1,
        tokens=tokens,
        settled=tokens if settled is None else settled * seconds,
        error=error,
        seconds=seconds,
        least_seconds=seconds if least is None else least,
        is_measured=measured,
    )


def situation(*arms, held="off", **changes):
    values = {
        "is_new_load": False,
        "leader": "off",
        "num_leading": 0,
        "num_switches": 0,
        "num_blocked": 0,
        **changes,
    }
    return Situation(arms=(arm("off", 1.0, seconds=0.5), *arms), held=held, **values)


def random_situation(seed):
    source = random.Random(seed)
    names = ["chain-1", "chain-3", "tree-8", "tree-16"]
    arms = []
    for idx, name in enumerate(names):
        seconds = math.inf if source.random() < 0.15 else 0.6 + 0.3 * idx
        tokens = source.uniform(0.8, 1.6) * (1.0 if math.isinf(seconds) else seconds)
        error = source.choice((0.0, 0.05, 0.3))
        settled = tokens * source.uniform(0.8, 1.2)
        is_measured = source.random() < 0.7
        least = seconds if is_measured else 0.85 * seconds
        arms.append(ArmEstimate(name, 1, tokens, settled, error, seconds, least, is_measured))
    return situation(
        *arms,
        held=source.choice(("off", *names)),
        is_new_load=source.random() < 0.3,
        leader=source.choice(("off", *names)),
        num_leading=source.randrange(5),
        num_switches=source.choice((0, 0, 1, 3)),
        num_blocked=source.choice((0, 0, 0, 0, 9)),
        is_broken=source.random() < 0.2,
        is_settled=source.random() < 0.7,
        max_seconds=source.choice((math.inf, math.inf, 1.0)),
    )
