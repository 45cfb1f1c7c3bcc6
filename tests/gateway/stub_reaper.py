"""A reaper that only tells that it ran: writes the hosts it was given to the file ``STUB_REAPED``."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--hosts", type=json.loads, action="extend")
hosts = parser.parse_args().hosts
print("reaping", len(hosts), "hosts")
if target := os.environ.get("STUB_REAPED"):
    with Path(target).open("a") as file:
        file.write(json.dumps(hosts) + "\n")
