"""An engine without Monarch, for tests of the server. It speaks the control channel with the standard library alone.

It answers a new connection with 101, then reads commands, one per line, and answers each with a line of JSON. The
variable ``STUB_ENGINE`` changes its behaviour: ``crash`` (fails on startup), ``mute`` (never takes a connection),
``deaf`` (ignores the request to end).
"""

from __future__ import annotations

import argparse
import array
import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

MODE = os.environ.get("STUB_ENGINE", "")


class Stub:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.client: socket.socket | None = None
        self.head = self.run_name = self.name = ""
        self.proof: dict[str, str] = {}
        self.assigned: dict[str, Any] = {}

    def send(self, **message: Any) -> None:
        self.control.send(json.dumps(message).encode())

    def run(self) -> None:
        while True:
            watched = [self.control, *([self.client] if self.client else [])]
            readable, _, _ = select.select(watched, [], [])
            if self.control in readable and not self.on_control():
                return
            if self.client is not None and self.client in readable:
                self.on_client(self.client)

    def on_control(self) -> bool:
        data, ancillary, _, _ = self.control.recvmsg(1 << 20, socket.CMSG_SPACE(16))
        if not data:
            return False
        message = json.loads(data)
        if message["type"] == "assign":
            self.assigned = message
        elif message["type"] == "connection":
            descriptors = array.array("i")
            descriptors.frombytes(ancillary[0][2])
            self.proof = {name: message[name] for name in ("gateway", "proof_key")}
            self.run_name = message["run"]
            self.take(socket.socket(fileno=descriptors[0]), message["head"])
        elif message["type"] == "run_ended" and message["run"] == self.run_name:
            if self.client is not None:
                self.client.shutdown(socket.SHUT_RDWR)
            if not self.name and MODE != "deaf":
                self.send(type="ended", reason="its run has ended")
                return False
        elif message["type"] == "report_state":
            self.send(type="state", connected=self.client is not None)
        elif message["type"] == "hosts":
            self.answer(message)
        elif message["type"] == "end" and MODE != "deaf":
            self.send(type="ended", reason=message["reason"])
            return False
        return True

    def take(self, client: socket.socket, head: str) -> None:
        if MODE == "mute":
            return
        if self.client is not None:
            self.client.close()
            self.send(type="disconnected")
        client.setblocking(True)
        self.client, self.head = client, head
        client.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        self.send(type="connected", run=self.run_name)

    def on_client(self, client: socket.socket) -> None:
        data = client.recv(65536)
        if not data:
            client.close()
            self.client = None
            self.send(type="disconnected")
            return
        for line in data.decode().splitlines():
            self.run_command(*line.split(" ", 1))

    def run_command(self, command: str, argument: str = "") -> None:
        if command == "describe":
            names = [name for name in os.environ if name.startswith("MESHGATE_")]
            nodelay = self.client and self.client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            facts = {"pid": os.getpid(), "head": self.head, "environment": names, "nodelay": bool(nodelay)}
            self.answer({**facts, **self.assigned, **self.proof})
        elif command == "print":
            print(argument, flush=True)
            self.answer({})
        elif command == "detach":
            self.name = argument
            self.send(type="named", name=argument)
            self.answer({})
        elif command == "hosts":
            self.send(type="ask_hosts", mesh=argument)
        elif command == "spawn":
            self.answer({"pid": subprocess.Popen(["sleep", "600"]).pid})
        elif command == "send":
            self.control.send(argument.encode())
        elif command == "goodbye":
            self.send(type="ended", reason="the client ended the session")
            sys.exit(0)
        elif command == "exit":
            sys.exit(int(argument))
        elif command == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def answer(self, message: dict[str, Any]) -> None:
        if self.client is not None:
            self.client.sendall(json.dumps(message).encode() + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int)
    options = parser.parse_args()
    if MODE == "crash":
        raise RuntimeError("this stub crashes on startup")
    Stub(socket.socket(fileno=options.control_fd)).run()


if __name__ == "__main__":
    main()
