from __future__ import annotations

import io
import json
from pathlib import Path

from meshgate_sync.distribution.serve import main
from meshgate_sync.relay.plan import GATEWAY


def test_it_answers_each_line_and_ends_with_its_input(tmp_path: Path) -> None:
    first = {"name": "h", "secret": "00", "owner": "o", "home": str(tmp_path / "home")}
    second = {"routes": {"control": [GATEWAY], "stripes": [[GATEWAY]]}, "addresses": {GATEWAY: ["127.0.0.1", 1]}}
    out = io.StringIO()
    main(io.StringIO(f"{json.dumps(first)}\n{json.dumps(second)}\n"), out)
    address, configured = (json.loads(line) for line in out.getvalue().splitlines())
    assert address["address"][0] == "127.0.0.1"
    assert configured == {"configured": True}


def test_an_unused_store_is_closed_when_the_input_ends_early(tmp_path: Path) -> None:
    first = {"name": "h", "secret": "00", "owner": "o", "home": str(tmp_path / "home")}
    for _ in range(2):  # a store that was left open would keep its place from the second
        out = io.StringIO()
        main(io.StringIO(f"{json.dumps(first)}\n"), out)
        assert json.loads(out.getvalue())["home"] == str(tmp_path / "home")
