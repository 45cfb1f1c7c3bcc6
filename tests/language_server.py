"""A Python language server, as an editor uses it, for tests of what it shows."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMMAND = str(Path(sys.executable).with_name("basedpyright-langserver"))


class LanguageServer:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._requests = 0

    def open(self, path: Path) -> None:
        workspace = [{"uri": path.parent.as_uri(), "name": "program"}]
        capabilities = {"textDocument": {"hover": {"contentFormat": ["markdown"]}}}
        self.request("initialize", processId=None, rootUri=None, workspaceFolders=workspace, capabilities=capabilities)
        self._send({"method": "initialized", "params": {}})
        document = {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": path.read_text()}
        self._send({"method": "textDocument/didOpen", "params": {"textDocument": document}})

    def hover(self, path: Path, expression: str) -> str:
        """What an editor shows when the mouse is on the end of ``expression``, where the file has it last."""
        before = path.read_text().rpartition(expression)[0] + expression
        position = {"line": before.count("\n"), "character": len(before.rpartition("\n")[2]) - 1}
        shown = self.request("textDocument/hover", textDocument={"uri": path.as_uri()}, position=position)
        return str(shown["contents"]["value"])

    def request(self, method: str, **params: Any) -> Any:
        self._requests += 1
        self._send({"id": self._requests, "method": method, "params": params})
        while True:
            message = self._receive()
            if "method" in message and "id" in message:  # what it asks of the editor
                self._send({"id": message["id"], "result": None})
            elif message.get("id") == self._requests:
                return message["result"]

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._stdin.flush()

    def _receive(self) -> Any:
        length = 0
        while line := self._stdout.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        assert length, "the language server has ended"
        return json.loads(self._stdout.read(length))


@contextlib.contextmanager
def language_server(directory: Path) -> Iterator[LanguageServer]:
    """Serves ``directory``, in which ``pyrightconfig.json`` says where modules are."""
    with subprocess.Popen(
        [COMMAND, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=directory
    ) as process:
        try:
            yield LanguageServer(process)
        finally:
            process.kill()
