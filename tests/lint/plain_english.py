"""Finds phrases that a native reader has to decode, in comments, docstrings, string literals, test names and Markdown.

    python tests/lint/plain_english.py                    # the whole repository; exits with 1 if there are findings
    python tests/lint/plain_english.py client/meshgate/cli docs/jobs.md
    python tests/lint/plain_english.py --count            # the number of findings in each folder; always exits with 0

Each phrase in ``PHRASES`` comes with what to write instead. Add a phrase only if no good sentence contains it.
"""

from __future__ import annotations

import argparse
import bisect
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKED = ("*.py", "*.md", "*.toml", "*.yaml", "*.yml", "Makefile", "Dockerfile", ".ci/run", "tests/kubernetes/images")
NOT_CHECKED = {"tests/lint/plain_english.py", "tests/lint/test_plain_english.py"}  # they quote the phrases

_SENTENCE = r"(?:\A\s*|[.!:;] |\n\s*\n\s*)"
_NO_QUESTION = r"(?![^.?!]*\?)"
PHRASES: tuple[tuple[str, str], ...] = (
    # none, nothing, nobody
    (r"(?<!there\s)\b(?:is|are|was|were) none\b", "is not a ..., is invalid"),
    (r"\bwhere there (?:is|are|was|were|is no|are no)\b", "if there is"),
    (r"\b(?:that|which) (?:is|are|was|were) no (?!(?:longer|more|fewer|less)\b)", "that is not a ..."),
    (r"\bnobody\b", "no caller, no process, nothing"),
    (r"\bsomebody\b", "a caller, a process"),
    # who, without a noun
    (r"\bwhoever\b", "the caller, the process"),
    (_SENTENCE + r"Who\b" + _NO_QUESTION, "the caller, the session, a user who"),
    (r"\b(?:of|to|by|for|from|with|than) who\b", "of the caller, of the process that"),
    (r"\bwho (?:asks|asked|waits|waited|posts)\b", "the caller, the waiter"),
    # tell
    (r"\btold\b", "reported, logged, raised, notified"),
    (r"\btells\b", "reports, notifies, shows, says"),
    (r"\b(?:is|are|was|were|be|been) said\b", "is reported, is stated"),
    # conditions
    (_SENTENCE + r"Where (?:it|they|there|that|this|no|none|nothing|one)\b" + _NO_QUESTION, "if, when"),
    (r"(?:``)?\bNone(?:``)? where\b", "None if"),
    (r"\b[Rr]aises [^.;]{0,60}?(?<!places) where\b", "raises ... if"),
    (r"\bwhere (?:it|they|one) can(?:not)?\b", "if possible, if it can"),
    # archaic and private words
    (r"\banew\b", "again, from scratch, a new ..."),
    (r"\b(?:is|are|was|were|be|been|being) (?:not )?to be (?!able\b|sure\b)\w+(?:ed|en|t)\b", "must be, should be"),
    (r"\b(?:is|are|was|were|be|been|being) let go\b", "is released"),
    (r"\b(?:is|are|was|were|be|been|being) asked (?:of|for)\b", "is requested (from)"),
    (r"\b(?:can|could|cannot|to) be had\b", "is available"),
    (r"\b(?:has|have|had) not got\b", "does not have"),
    (r"\bof (?:ours|yours|theirs|hers)\b", "our ..., your ..."),
    (r"\bas (?:it stands|they stand)\b", "unchanged"),
    (r"\bover there\b", "in the cluster, on the host"),
    (r"\bgo(?:es)? on (?:with|as|regardless)\b|\bgo(?:es)? on(?=[.;,])", "continues"),
    (r"\bby now,", "already"),
    (r"\bof these,", "of them"),
    (r"\b(?:upon|amid|thereof|therein|hence|farewell|in vain)\b", "on, during, so, ..."),
    (r"\b(?:upkeep|tidings|likeness|likenesses|makings|soiled)\b", "a term of docs/glossary.md"),
)
_PHRASES = [(re.compile(phrase.replace(" ", r"\s+")), advice) for phrase, advice in PHRASES]

_STRING = re.compile(r"""\A[A-Za-z]*("{3}|'{3}|"|')(.*)\1\Z""", re.DOTALL)
_BETWEEN_LITERALS = {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT}


@dataclass(frozen=True, slots=True)
class Text:
    """A run of prose. ``starts`` has the offset and the line number of each of its parts."""

    text: str
    starts: tuple[tuple[int, int], ...]

    def line(self, offset: int) -> int:
        start, line = self.starts[bisect.bisect_right(self.starts, (offset, sys.maxsize)) - 1]
        return line + self.text.count("\n", start, offset)


@dataclass(frozen=True, slots=True)
class Finding:
    path: str
    line: int
    phrase: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.phrase!r}: write {self.advice}"


def joined(parts: Iterable[tuple[int, str]], between: str) -> Text:
    text, starts = "", []
    for line, part in parts:
        text += between if text else ""
        starts.append((len(text), line))
        text += part
    return Text(text, tuple(starts))


def of_python(source: str) -> Iterator[Text]:
    """Comments (consecutive lines are one text), string literals (adjacent ones are one text) and names of tests."""
    comments: list[tuple[int, str]] = []
    strings: list[tuple[int, str]] = []
    previous = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            if comments and line > comments[-1][0] + 1:
                yield joined(comments, "\n")
                comments = []
            comments.append((line, token.string.lstrip("#: ")))
        elif token.type == tokenize.STRING:
            match = _STRING.match(token.string)
            assert match is not None
            strings.append((line, match[2]))
        elif tokenize.tok_name[token.type] == "FSTRING_MIDDLE":  # from Python 3.12 on
            strings.append((line, token.string))
        elif token.type not in _BETWEEN_LITERALS:
            if strings and not tokenize.tok_name[token.type].startswith("FSTRING"):
                yield joined(strings, "")
                strings = []
            if token.type == tokenize.NAME and previous == "def" and token.string.startswith("test_"):
                yield Text(token.string.replace("_", " "), ((0, line),))
            previous = token.string
    if comments:
        yield joined(comments, "\n")


def of_markdown(source: str) -> Iterator[Text]:
    """Everything outside code blocks; code spans are blanked."""
    in_code = False
    kept = []
    for line in source.split("\n"):
        if line.lstrip().startswith("```"):
            in_code = not in_code
            kept.append("")
        else:
            kept.append("" if in_code else line)
    prose = re.sub(r"`[^`\n]+`", lambda span: "`" + " " * (len(span[0]) - 2) + "`", "\n".join(kept))
    yield Text(re.sub(r"^(\s*)(?:[#*|-]+ )", r"\1", prose, flags=re.MULTILINE), ((0, 1),))


def of_comments(source: str) -> Iterator[Text]:
    """Comment lines of a Makefile, a shell script, TOML or YAML."""
    lines = [(number, line.lstrip("# ")) for number, line in enumerate(source.split("\n"), 1) if line[:1] == "#"]
    if lines:
        yield joined(lines, "\n")


def texts(path: str, source: str) -> Iterator[Text]:
    if path.endswith(".py"):
        return of_python(source)
    return of_markdown(source) if path.endswith(".md") else of_comments(source)


def findings(path: str, source: str) -> list[Finding]:
    found = []
    for text in texts(path, source):
        for phrase, advice in _PHRASES:
            for match in phrase.finditer(text.text):
                shown = match[0].lstrip(".!:; \n")
                found.append(Finding(path, text.line(match.end() - len(shown)), " ".join(shown.split()), advice))
    return sorted(found, key=lambda finding: finding.line)


def tracked(paths: list[str]) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *(paths or CHECKED)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = [name for name in listed.stdout.splitlines() if name not in NOT_CHECKED and not name.endswith(".png")]
    return [name for name in names if (ROOT / name).is_file()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files and folders, from the repository root (default: everything)")
    parser.add_argument("--count", action="store_true", help="print only the number of findings in each folder")
    options = parser.parse_args(arguments)
    found = [finding for path in tracked(options.paths) for finding in findings(path, (ROOT / path).read_text())]
    if options.count:
        folders = Counter(str(Path(finding.path).parent) for finding in found)
        shown = [f"{number:5}  {folder}" for folder, number in sorted(folders.items(), key=lambda item: -item[1])]
    else:
        shown = [str(finding) for finding in found]
    for line in shown:
        print(line)
    if found:
        print(f"plain English: {len(found)} phrases to rewrite (python tests/lint/plain_english.py PATH lists them)")
    return 0 if options.count or not found else 1


if __name__ == "__main__":
    sys.exit(main())
