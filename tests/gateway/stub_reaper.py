"""A reaper that only tells that it ran: writes the hosts it was given to the file ``STUB_REAPED``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--hosts")
hosts = parser.parse_args().hosts
print("reaping", hosts)
if target := os.environ.get("STUB_REAPED"):
    with Path(target).open("a") as file:
        file.write(hosts + "\n")
