"""The arguments of `eyas rollout`.

What they do is left to `cli`.
"""

import argparse
import math
from typing import TypeAlias

# The type has no public name, and takes its argument for type checkers only.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001


def add_rollout(commands: Commands) -> None:
    """Add `eyas rollout`."""
    rollout = commands.add_parser("rollout", help="bring a draft to running replicas, or back")
    rollout.set_defaults(module="ops.rollout.cli")
    actions = rollout.add_subparsers(required=True, metavar="ACTION", dest="action")
    starting = _action(actions, "start", "canary a draft and promote or roll it back; takes up a killed one")
    starting.add_argument("draft", metavar="ID", help="of the registry; its beginning is enough")
    _action(actions, "status", "print where the rollout is")
    _action(actions, "promote", "give the draft to all replicas without waiting for a verdict")
    _action(actions, "abort", "go back to the draft before")


def _action(actions: Commands, name: str, text: str) -> argparse.ArgumentParser:
    action = actions.add_parser(name, help=text)
    where = action.add_argument_group("which replicas")
    where.add_argument("--dashboard", default="http://127.0.0.1:8265", metavar="URL", help="of Ray")
    where.add_argument("--ray-service", metavar="NAME", help="on Kubernetes, instead of --dashboard")
    where.add_argument("--namespace", default="eyas", metavar="NS")
    where.add_argument("--kubeconfig", metavar="FILE", help="else the pod's own account, or kubectl's file")
    where.add_argument("--server", default="http://127.0.0.1:8000", metavar="URL", help="has /metrics")
    where.add_argument("--state", metavar="FILE", help="the rollout is kept here (default: in the cache)")
    drafts = action.add_argument_group("drafts")
    drafts.add_argument("--model", default="smollm2", metavar="M", help="that the replicas serve")
    drafts.add_argument("--registry", metavar="URL", help="a folder or an fsspec URL (default: in the cache)")
    drafts.add_argument("--replica-registry", metavar="PATH", help="where replicas see the registry")
    pace = action.add_argument_group("pace and verdict")
    pace.add_argument("--canaries", type=_positive, default=1, metavar="N", help="replicas")
    pace.add_argument("--window", type=_above_zero, default=10.0, metavar="S", help="seconds of one sample")
    pace.add_argument("--windows", type=_positive, default=6, metavar="N", help="samples between two looks")
    pace.add_argument("--looks", type=_positive, default=10, metavar="N", help="then a person decides")
    pace.add_argument(
        "--follow", type=_above_zero, default=300.0, metavar="S", help="for replicas to load it"
    )
    pace.add_argument(
        "--margin", type=_share, default=0.03, metavar="X", help="acceptance length that may be lost, a share"
    )
    pace.add_argument(
        "--time-margin",
        type=_above_zero,
        default=0.03,
        metavar="X",
        help="share that a token may take longer",
    )
    return action


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return value


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, found {text}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must lie in 0 to 1, found {text}")
    return value
