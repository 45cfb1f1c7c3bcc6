"""``python -m meshgate``: the command line, where the command ``meshgate`` is not on the path."""

from __future__ import annotations

from meshgate.cli.app import app

app(prog_name="meshgate")
