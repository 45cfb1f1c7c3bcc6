"""Drives an installed Chromium, in tests and for the pictures of the documentation."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The first is Chromium without its windows, as Debian packages it: a page takes 0.7 s of processor time instead of 2 s.
PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, PROGRAMS)), None)

_LAUNCHER = """#!{python}
import ctypes, os, struct, sys

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

SOCKET = {{"x86_64": 41, "aarch64": 198}}[os.uname().machine]
LOAD, UNLESS_EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER, FIRST_ARGUMENT, AF_NETLINK, ALLOW, EACCES = 0, 16, 16, 0x7FFF0000, 0x50000 | 13
instructions = [
    (LOAD, 0, 0, NUMBER),
    (UNLESS_EQUAL, 0, 3, SOCKET),
    (LOAD, 0, 0, FIRST_ARGUMENT),
    (UNLESS_EQUAL, 0, 1, AF_NETLINK),
    (RETURN, 0, 0, EACCES),
    (RETURN, 0, 0, ALLOW),
]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
program = Program(len(instructions), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(22, 2, ctypes.byref(program), 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    raise OSError(ctypes.get_errno(), "seccomp")
os.execv({program!r}, [{program!r}, *sys.argv[1:]])
"""


@contextmanager
def started_chromium() -> Iterator[Any]:
    """A browser of playwright's. As root, Chromium starts only without its sandbox."""
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None
    root = os.getuid() == 0
    with sync_playwright() as playwright, tempfile.TemporaryDirectory(prefix="meshgate-") as directory:
        program = without_netlink(CHROMIUM, Path(directory)) if root else CHROMIUM
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"] if root else [])
        yield browser
        browser.close()


def without_netlink(program: str, directory: Path) -> str:
    """A program that starts ``program`` so that it cannot watch the machine's interfaces. Chromium ends requests with
    ERR_NETWORK_CHANGED whenever one comes or goes, even those to the loopback, and beside a test of namespaces or a
    cluster they come and go all the time. Only root may filter system calls without giving up set-user-ID programs."""
    launcher = directory / Path(program).name
    launcher.write_text(_LAUNCHER.format(python=sys.executable, program=program))
    launcher.chmod(0o700)
    return str(launcher)
