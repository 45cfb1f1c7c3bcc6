"""Writes what each rank prints to a file of its own, ``DIRECTORY/MESH/RANK.log``, as torchrun's ``--log-dir`` does.

A file has the lines of both streams in the order of their arrival, without labels and without the states of progress
bars. Files are only appended to: a mesh of the same name, or the program when it is run again, continues them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from meshgate_wire.messages import OutputLine

MAX_OPEN = 128  # files; others are opened again when they are written
MAX_NAME = 200  # bytes of a folder's name; file systems take 255
UNNAMED = "anon"  # what a mesh is called that has no name, as in Monarch

_Source: TypeAlias = tuple[int, str]  # a mesh of processes, and one of its streams


@dataclass(slots=True, eq=False)
class _RankFile:
    """``unfinished``: the source of the line that has no end yet; (0, "") if it is not known. ``lost``: the lines that
    could not be written since ``reason``. ``note``: what is written next."""

    path: Path
    descriptor: int = -1
    opened: bool = False  # at some time
    unfinished: _Source | None = None
    lost: int = 0
    reason: str = ""
    note: str = ""


class LogFiles:
    """Files below ``directory``, which is created. Not safe to use on several threads.

    ``name_of(procs)`` is the name of a mesh of processes, "" if it is not known. Raises ValueError, which names
    ``directory``, if no file can be made in it.
    """

    def __init__(self, directory: str, name_of: Callable[[int], str] = lambda procs: "") -> None:
        self._directory = Path(os.path.abspath(os.path.expanduser(directory)))
        self._name_of = name_of
        self._folders: dict[int, str] = {}  # by mesh of processes, since its first line
        self._files: dict[tuple[str, int], _RankFile] = {}
        self._open: OrderedDict[_RankFile, None] = OrderedDict()  # the one that was written last is last
        self._failing: set[_RankFile] = set()
        self._note = ""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if not any(self._directory.iterdir()):
                # The directory may be in the project: neither git nor the code sync is to take it.
                (self._directory / ".gitignore").write_text("*\n", encoding="utf-8")
            elif not os.access(self._directory, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise ValueError(
                f"cannot write what ranks print to {self._directory}: {error.strerror or error}. Name another "
                "directory in MESHGATE_LOG_DIR or --log-dir"
            ) from error

    def write(self, lines: Iterable[OutputLine]) -> list[OutputLine]:
        """Appends ``lines``. Returns what to tell the user: that files cannot be written, once until they can."""
        texts: dict[_RankFile, list[OutputLine]] = {}
        notices: list[OutputLine] = []
        for line in lines:
            if not line.ranks or line.end == "\r":  # a line of the gateway; a state of a progress bar
                continue
            folder = self._folder_of(line)
            for rank in line.every_rank():
                texts.setdefault(self._file(folder, rank), []).append(line)
        for file, own in texts.items():
            if (problem := self._append(file, own)) and not self._failing:
                notices.append(
                    _notice(
                        f"cannot write what ranks print to {file.path}: {problem}. The program continues, and the file "
                        "will say how many lines are missing once it can be written again. Make space there, or name "
                        "another directory in MESHGATE_LOG_DIR for the next run"
                    )
                )
            (self._failing.add if problem else self._failing.discard)(file)
        return notices

    def note(self, text: str) -> None:
        """Writes ``text`` to each file, and first to those that are made later: lines of any rank may be missing."""
        self._note = text
        for file in self._files.values():
            file.note = text
            self._append(file, ())

    def close(self) -> None:
        """Closes the files. Those that miss lines say so, if they can be written again."""
        for file in list(self._failing):
            self._append(file, ())
        for file in list(self._open):
            self._close(file)

    def _folder_of(self, line: OutputLine) -> str:
        """The same for all lines of a mesh of processes, although its lines are labelled with the names of actors."""
        if (folder := self._folders.get(line.procs)) is not None:
            return folder
        given = self._name_of(line.procs) if line.procs else ""
        name = line.mesh or UNNAMED if given in ("", UNNAMED) else given
        if line.procs and name != UNNAMED:  # the first actors of processes without a name give them theirs
            self._folders[line.procs] = folder_name(name)
        return folder_name(name)

    def _file(self, folder: str, rank: int) -> _RankFile:
        if (file := self._files.get((folder, rank))) is None:
            file = self._files[folder, rank] = _RankFile(self._directory / folder / f"{rank}.log", note=self._note)
        return file

    def _append(self, file: _RankFile, lines: Sequence[OutputLine]) -> str:
        """Writes ``lines``; returns why that failed, or "". Then nothing of them is in the file."""
        before = file.unfinished
        try:
            self._require_open(file)
            data = bytearray()
            if file.lost:
                data += _line_break(file, None) + f"[meshgate] {missing_text(file.lost, file.reason)}\n".encode()
            if file.note:
                data += _line_break(file, None) + f"[meshgate] {file.note}\n".encode()
            for line in lines:
                source = (line.procs, line.stream)
                data += _line_break(file, source) + line.text.encode(errors="replace")
                if line.end:
                    data += b"\n"
                file.unfinished = None if line.end else source
            _write_whole(file.descriptor, data)
        except OSError as error:
            file.unfinished = before
            file.lost, file.reason = file.lost + len(lines), error.strerror or str(error)
            self._close(file)
            return file.reason
        file.lost, file.note = 0, ""
        return ""

    def _require_open(self, file: _RankFile) -> None:
        if file.descriptor < 0:
            if len(self._open) >= MAX_OPEN:
                self._close(next(iter(self._open)))
            file.path.parent.mkdir(parents=True, exist_ok=True)
            file.descriptor = os.open(file.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            if not file.opened:  # an earlier program may have left a line without an end
                file.opened = True
                size = os.fstat(file.descriptor).st_size
                if size and os.pread(file.descriptor, 1, size - 1) != b"\n":
                    file.unfinished = (0, "")
        self._open[file] = None
        self._open.move_to_end(file)

    def _close(self, file: _RankFile) -> None:
        self._open.pop(file, None)
        descriptor, file.descriptor = file.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # of a network file system, which reports it to write() as well
                os.close(descriptor)


def folder_name(mesh: str) -> str:
    """``mesh`` as the name of a folder. Characters that a file system or a shell may not take are percent-encoded, and
    no two names give the same folder."""
    name = "".join(
        character if character.isalnum() or character in "-_" or (character == "." and at) else _percent(character)
        for at, character in enumerate(mesh)
    )
    encoded = name.encode()
    if len(encoded) <= MAX_NAME:
        return name or "%"
    digest = hashlib.sha256(mesh.encode()).hexdigest()[:16]
    return f"{encoded[:MAX_NAME].decode(errors='ignore')}%{digest}"


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode(errors="replace"))


def _line_break(file: _RankFile, source: _Source | None) -> bytes:
    """What ends the unfinished line of another source, so that no line has parts of two."""
    if file.unfinished is None or file.unfinished == source:
        return b""
    file.unfinished = None
    return b"\n"


def missing_text(lost: int, reason: str) -> str:
    """The notice in place of ``lost`` lines."""
    lines = "1 line is" if lost == 1 else f"{lost} lines are"
    return f"{lines} missing here, because writing failed: {reason}"


def _notice(text: str) -> OutputLine:
    return OutputLine(stream="stderr", mesh="meshgate", text=text)


def _write_whole(descriptor: int, data: bytes | bytearray) -> None:
    """Writes all of ``data``; if that fails, removes what was written of it and raises OSError."""
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, memoryview(data)[written:])
    except OSError:
        if written:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise
