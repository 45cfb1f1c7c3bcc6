"""Parses a Dockerfile into a base image and steps. Pure: text in, steps out; reads no files.

Only instructions that can run in a started pod are accepted: one FROM, and RUN, ENV, COPY, WORKDIR, ARG. Others are
rejected with their line, because ignoring a USER or a second stage would produce a different image.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from meshgate.images.expansion import REFERENCE, expand
from meshgate.images.plan import Argument, Copy, RunBash, SetEnvVars, Step, WorkDir

_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(.*?)\s*$")
_NAME = re.compile(r"[A-Za-z_]\w*$")
_HEREDOC = re.compile(r"(?<!<)<<-?\s*[\"']?\w")
_ALTERNATIVES = {
    "ADD": "use COPY for local files and RUN to download others",
    "USER": "steps run as the user of the worker process",
    "SHELL": "commands run in bash if the host has it, else in sh",
}


class DockerfileError(ValueError):
    """A Dockerfile contains something that cannot run in a started pod. ``line`` counts from 1."""

    def __init__(self, name: str, line: int, message: str) -> None:
        super().__init__(f"{name}, line {line}: {message}")
        self.line = line


@dataclass(frozen=True, slots=True)
class ParsedDockerfile:
    """``reference`` is the image of FROM."""

    reference: str
    steps: tuple[Step, ...]


def parse(
    text: str, *, context: str, name: str = "Dockerfile", arguments: Mapping[str, str] | None = None
) -> ParsedDockerfile:
    """Parses ``text``. COPY copies from the directory ``context``; ``arguments`` are values of ARGs.

    Raises DockerfileError.
    """
    reader = _Reader(context, name, dict(arguments or {}))
    for line, instruction in _instructions(text, name):
        reader.read(line, instruction)
    if reader.reference is None:
        raise DockerfileError(name, 1, "FROM is missing")
    return ParsedDockerfile(reader.reference, tuple(reader.steps))


def _instructions(text: str, name: str) -> Iterator[tuple[int, str]]:
    """Each instruction with the number of its first line; joins continued lines and drops comments."""
    start, parts = 0, list[str]()
    directives = True
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        bare = line.strip()
        if directives and (found := _DIRECTIVE.match(bare)):
            if found[1].lower() == "escape" and found[2] != "\\":
                raise DockerfileError(name, number, f"escape={found[2]} is not supported: use \\")
            continue
        directives = False
        if bare.startswith("#") or not bare:
            continue
        start = start if parts else number
        if bare.endswith("\\"):
            parts.append(line.rstrip()[:-1])
            continue
        yield start, "".join((*parts, line)).strip()
        parts = []
    if parts:
        yield start, "".join(parts).strip()


@dataclass(slots=True)
class _Reader:
    """``known``: the variables whose values the Dockerfile decides. Those of the base image are not known here."""

    context: str
    name: str
    arguments: dict[str, str]
    reference: str | None = None
    steps: list[Step] = field(default_factory=list)
    before_from: dict[str, str | None] = field(default_factory=dict)
    known: dict[str, str | None] = field(default_factory=dict)
    line: int = 0

    def read(self, line: int, instruction: str) -> None:
        self.line = line
        word, *following = instruction.split(maxsplit=1)
        keyword, rest = word.upper(), "".join(following)
        handlers: dict[str, Callable[[str], None]] = {
            "FROM": self._from,
            "ARG": self._arg,
            "ENV": self._env,
            "RUN": self._run,
            "COPY": self._copy,
            "WORKDIR": self._workdir,
        }
        if keyword not in handlers:
            reason = _ALTERNATIVES.get(keyword, "only FROM, RUN, ENV, COPY, WORKDIR and ARG can run in a started pod")
            raise self._error(f"{keyword} is not supported: {reason}")
        if not rest:
            raise self._error(f"{keyword} has no arguments")
        if keyword not in ("FROM", "ARG") and self.reference is None:
            raise self._error(f"{keyword} comes before FROM")
        handlers[keyword](rest)

    def _from(self, rest: str) -> None:
        if self.reference is not None:
            raise self._error("a second FROM is not supported: build multi-stage images beforehand")
        words = [word for word in rest.split() if not word.startswith("--platform=")]
        if not (len(words) == 1 or (len(words) == 3 and words[1].upper() == "AS")):
            raise self._error(f"invalid FROM: expected one image, not {rest!r}")
        self.reference = self._resolved(words[0], self.before_from)

    def _arg(self, rest: str) -> None:
        for word in self._words(rest):
            name, equals, default = word.partition("=")
            self._require_name(name)
            if self.reference is None:
                value = self._resolved(default, self.before_from) if equals else None
                self.before_from[name] = self.arguments.get(name, value)
                continue
            value = self._resolved(default, self.known) if equals else self.before_from.get(name)
            value = self.arguments.get(name, value)
            if value is None:
                continue
            self.known[name] = value
            self.steps.append(Argument(name, value))

    def _env(self, rest: str) -> None:
        words = self._words(rest)
        if "=" not in words[0]:  # the form ``ENV NAME value``
            name, _, value = rest.partition(" ")
            words = [f"{name}={value.strip()}"]
            if not value.strip():
                raise self._error(f"ENV {name} has no value")
        variables = []
        for word in words:
            name, equals, value = word.partition("=")
            self._require_name(name)
            if not equals:
                raise self._error(f"invalid ENV: expected NAME=value, not {word!r}")
            variables.append((name, value))
        values = {name: self._if_known(value) for name, value in variables}  # none sees the others
        self.known.update(values)
        self.steps.append(SetEnvVars(tuple(variables), expand=True))

    def _run(self, rest: str) -> None:
        if rest.startswith("--"):
            raise self._error(f"RUN {rest.split(maxsplit=1)[0]} is not supported")
        if _HEREDOC.search(rest):
            raise self._error("here-documents are not supported: join commands with && and \\")
        argv = self._json(rest)
        self.steps.append(RunBash(shlex.join(argv) if argv is not None else rest))

    def _copy(self, rest: str) -> None:
        if rest.startswith("--"):
            raise self._error(f"COPY {rest.split(maxsplit=1)[0]} is not supported")
        if _HEREDOC.search(rest):
            raise self._error("here-documents are not supported")
        words = self._json(rest) or rest.split()
        if len(words) < 2:
            raise self._error("COPY needs a source and a destination")
        sources = []
        for word in words[:-1]:
            path = os.path.normpath(self._resolved(word, self.known).lstrip("/") or ".")
            if path.split(os.sep)[0] == os.pardir:
                raise self._error(f"{word} is outside the Dockerfile's directory")
            sources.append(os.path.join(self.context, path))
        destination = words[-1]
        if len(sources) > 1 and not destination.endswith("/"):
            raise self._error(f"COPY has several sources, so the destination {destination!r} must end with /")
        self._if_known(destination)
        self.steps.append(Copy(tuple(sources), destination, expand=True, context=self.context))

    def _workdir(self, rest: str) -> None:
        self._if_known(rest)
        self.steps.append(WorkDir(rest))

    # --- expansion

    def _words(self, rest: str) -> list[str]:
        """Splits at white space outside quotes; keeps the quotes."""
        found = re.findall(r"""(?:\\.|"(?:\\.|[^"\\])*"|'[^']*'|[^\s"'])+""", rest)
        if "".join(found) != re.sub(r"\s", "", rest) and "".join("".join(found).split()) != "".join(rest.split()):
            raise self._error(f"unclosed quote: {rest}")
        return found

    def _json(self, rest: str) -> list[str] | None:
        if not rest.startswith("["):
            return None
        try:
            value = json.loads(rest)
        except json.JSONDecodeError:
            return None
        return value if isinstance(value, list) and all(isinstance(each, str) for each in value) else None

    def _resolved(self, word: str, known: Mapping[str, str | None]) -> str:
        """Expands ``word``, whose variables must be known here."""
        unknown: list[str] = []
        value = self._expanded(word, known, unknown)
        if unknown:
            raise self._error(f"${unknown[0]} has no value in this Dockerfile")
        return value

    def _if_known(self, word: str) -> str | None:
        """Expands ``word``; None if the value depends on the base image."""
        unknown: list[str] = []
        value = self._expanded(word, self.known, unknown)
        return None if unknown else value

    def _expanded(self, word: str, known: Mapping[str, str | None], unknown: list[str]) -> str:
        with_default = {found[2] for found in REFERENCE.finditer(word) if found[3]}  # such as ${A:-b}

        def lookup(name: str) -> str | None:
            value = known.get(name)
            if value is None and name not in with_default:
                unknown.append(name)
            return value

        try:
            return expand(word, lookup)
        except ValueError as error:
            raise self._error(str(error)) from None

    def _require_name(self, name: str) -> None:
        if not _NAME.match(name):
            raise self._error(f"{name!r} is not a valid variable name")

    def _error(self, message: str) -> DockerfileError:
        return DockerfileError(self.name, self.line, message)
