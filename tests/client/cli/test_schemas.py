"""``meshgate schema``."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from meshgate.cli.app import COMMANDS, app
from meshgate.cli.schemas import SCHEMAS


def test_every_schema_describes_each_field_of_its_command(run: CliRunner) -> None:
    for command in SCHEMAS:
        schema = json.loads(run.invoke(app, ["schema", command]).output)
        assert schema["type"] == "object"
        assert schema["properties"]
    unknown = run.invoke(app, ["schema", "version"])
    assert unknown.exit_code == 2
    assert "prints no JSON; commands that do: ls, kill" in unknown.output


def test_every_command_that_prints_json_has_a_schema() -> None:
    printing = {
        name
        for name, place in COMMANDS.items()
        if any("--json" in parameter.opts for parameter in place.load(name).params)
    }
    assert printing == set(SCHEMAS)
