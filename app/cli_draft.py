"""`eyas draft`: heads of other projects in and out, and smaller heads.

The work itself is left to the engine's `draft`.
"""

import argparse
from typing import TextIO

from engine import resolve_model
from engine.draft.exchange import export_draft, import_draft


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Run one of the commands."""
    model = resolve_model(options.model)
    if options.action == "import":
        kind = import_draft(options.source, model, options.out, options.tap_convention)
        out.write(f"{options.out}: {kind} head of {options.source}\n")
    else:
        export_draft(options.source, model, options.out, options.format, options.num_drafts)
        out.write(f"{options.out}: {options.format} checkpoint of {options.source}\n")
    return 0
