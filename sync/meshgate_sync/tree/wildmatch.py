"""Translates the patterns of git's ignore files into regular expressions, as gitignore(5) and git's wildmatch.c read
them.

Patterns and paths are bytes, as in git: ``?`` matches one byte. Matching is case-sensitive on every platform, although
git's depends on ``core.ignorecase``: the hosts are case-sensitive.
"""

from __future__ import annotations

import re
import string

_SLASH = ord("/")
_SPACE = b"\t\n\r "  # git's, without vertical tab and form feed
_PRINTABLE = bytes(range(0x20, 0x7F))
_CLASSES = {
    b"alnum": (string.ascii_letters + string.digits).encode(),
    b"alpha": string.ascii_letters.encode(),
    b"blank": b"\t ",
    b"cntrl": bytes([*range(0x20), 0x7F]),
    b"digit": string.digits.encode(),
    b"graph": _PRINTABLE.strip(b" "),
    b"lower": string.ascii_lowercase.encode(),
    b"print": _PRINTABLE,
    b"punct": string.punctuation.encode(),
    b"space": _SPACE,
    b"upper": string.ascii_uppercase.encode(),
    b"xdigit": string.hexdigits.encode(),
}


def compile_wildmatch(pattern: bytes) -> re.Pattern[bytes] | None:
    """The expression whose ``fullmatch`` accepts the paths that ``pattern`` matches; None if it cannot match any, such
    as one with an unclosed bracket."""
    parts: list[bytes] = []
    at = 0
    while at < len(pattern):
        start, byte = at, pattern[at : at + 1]
        at += 1
        if byte == b"*":
            while pattern[at : at + 1] == b"*":
                at += 1
            at += _add_stars(parts, pattern, start, at)
        elif byte == b"?":
            parts.append(b"[^/]")
        elif byte == b"[":
            bracket = _bracket(pattern, at)
            if bracket is None:
                return None
            accepted, at = bracket
            parts.append(b"[" + b"".join(b"\\x%02x" % each for each in sorted(accepted)) + b"]")
        elif byte == b"\\":
            if at == len(pattern):
                return None
            parts.append(re.escape(pattern[at : at + 1]))
            at += 1
        else:
            parts.append(re.escape(byte))
    return re.compile(b"".join(parts), re.DOTALL)


def _add_stars(parts: list[bytes], pattern: bytes, start: int, end: int) -> int:
    """Adds what the asterisks in ``pattern[start:end]`` match; returns how many bytes after them are consumed."""
    after = pattern[end:]
    between_slashes = (start == 0 or pattern[start - 1] == _SLASH) and (not after or after.startswith((b"/", b"\\/")))
    if end - start == 1 or not between_slashes:
        parts.append(b"[^/]*")
        return 0
    if after.startswith(b"/"):
        parts.append(b"(?:.*/)?")
        return 1
    parts.append(b".*")
    return 0


def _bracket(pattern: bytes, at: int) -> tuple[set[int], int] | None:
    """The bytes that the bracket expression whose content begins at ``at`` accepts, and where the pattern continues;
    None if it is malformed. It never accepts a slash."""
    negated = pattern[at : at + 1] in (b"!", b"^")
    at += negated
    members: set[int] = set()
    previous = 0  # the start of a range that "-" would complete
    first = True
    while first or pattern[at : at + 1] != b"]":
        first = False
        name = _class_name(pattern, at)
        if name is not None:
            if name not in _CLASSES:
                return None
            members.update(_CLASSES[name])
            at += len(name) + 4
            previous = 0
            continue
        is_range = previous and pattern[at : at + 1] == b"-" and pattern[at + 1 : at + 2] not in (b"]", b"")
        at += bool(is_range)
        at += pattern[at : at + 1] == b"\\"
        if at >= len(pattern):
            return None
        members.update(range(previous, pattern[at] + 1) if is_range else (pattern[at],))
        previous = 0 if is_range else pattern[at]
        at += 1
    accepted = set(range(256)) - members if negated else members
    accepted.discard(_SLASH)
    return (accepted, at + 1) if accepted else None


def _class_name(pattern: bytes, at: int) -> bytes | None:
    """``digit`` if ``[:digit:]`` is at ``at``; None if no character class is there."""
    if not pattern.startswith(b"[:", at):
        return None
    end = pattern.find(b"]", at + 2)
    if end < at + 3 or pattern[end - 1 : end] != b":":
        return None
    return pattern[at + 2 : end - 1]
