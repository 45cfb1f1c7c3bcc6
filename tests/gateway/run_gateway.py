"""Runs the gateway with a stub engine and a stub reaper."""

from __future__ import annotations

import sys
from pathlib import Path

from meshgate_gateway.__main__ import main
from meshgate_gateway.gateway import Commands

HERE = Path(__file__).parent

if __name__ == "__main__":
    main(Commands([sys.executable, str(HERE / "stub_engine.py")], [sys.executable, str(HERE / "stub_reaper.py")]))
