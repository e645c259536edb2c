"""Arguments of the commands that keep drafts in a registry.

What the commands do is left to `cli_registry`.
"""

import argparse
from pathlib import Path

from app.options import Commands, natural


def add_registry(actions: Commands) -> None:
    """Add the actions of `eyas draft` that need a registry."""
    adding = _action(actions, "add", "check a draft against its model and keep it")
    adding.add_argument("source", type=Path, metavar="DRAFT", help="a folder")
    adding.add_argument("--model", required=True, metavar="M", help="the model that the head is for")
    adding.add_argument("--name", metavar="NAME", help="for people; the folder's own where absent")
    _action(actions, "list", "list the drafts")
    showing = _action(actions, "show", "print all that is known of a draft")
    verifying = _action(actions, "verify", "read every file again and compare")
    for action in (showing, verifying):
        action.add_argument("draft", metavar="ID", help="the beginning of an id is enough")
    verifying.add_argument("--model", metavar="M", help="load it as a server of this model would")
    collecting = _action(actions, "gc", "remove old drafts and broken uploads")
    collecting.add_argument("--keep", type=natural, default=5, metavar="N", help="newest per base model")
    collecting.add_argument("--yes", action="store_true", help="really; else only say what would go")


def _action(actions: Commands, name: str, text: str) -> argparse.ArgumentParser:
    action = actions.add_parser(name, help=text)
    action.set_defaults(module="app.cli_registry")
    action.add_argument(
        "--registry", metavar="URL", help="a folder or an fsspec URL (default: registry in the cache)"
    )
    return action
