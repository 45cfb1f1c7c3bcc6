"""The parts of a Dockerfile that are accepted, and those that are rejected with their line."""

from __future__ import annotations

import pytest

from meshgate.images.dockerfile import DockerfileError, parse
from meshgate.images.plan import Argument, Copy, RunBash, SetEnvVars, Step, WorkDir

CONTEXT = "/project"


def env(*variables: tuple[str, str]) -> SetEnvVars:
    return SetEnvVars(variables, expand=True)


def copied(*sources: str, to: str) -> Copy:
    return Copy(tuple(f"{CONTEXT}/{source}" for source in sources), to, expand=True, context=CONTEXT)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("RUN make all", [RunBash("make all")]),
        ("run make", [RunBash("make")]),
        ("RUN\tmake", [RunBash("make")]),
        ('RUN ["echo", "a b"]', [RunBash("echo 'a b'")]),
        ("RUN a && \\\n    b", [RunBash("a &&     b")]),
        ("RUN a && \\\n# why\n\n    b", [RunBash("a &&     b")]),
        ("RUN echo '# not a comment'", [RunBash("echo '# not a comment'")]),
        ("RUN echo $HOME", [RunBash("echo $HOME")]),
        ("RUN cat <<< here", [RunBash("cat <<< here")]),
        ("# a comment\n\nRUN a", [RunBash("a")]),
        ("ENV A=1", [env(("A", "1"))]),
        ('ENV A="b c" D=e\\ f', [env(("A", '"b c"'), ("D", "e\\ f"))]),
        ("ENV A b c", [env(("A", "b c"))]),
        ("ENV PATH=/opt/bin:$PATH", [env(("PATH", "/opt/bin:$PATH"))]),
        ("WORKDIR /app", [WorkDir("/app")]),
        ("WORKDIR $HOME/app", [WorkDir("$HOME/app")]),
        ("COPY a b", [copied("a", to="b")]),
        ("COPY . .", [Copy((f"{CONTEXT}/.",), ".", expand=True, context=CONTEXT)]),
        ("COPY a.py b.py /app/", [copied("a.py", "b.py", to="/app/")]),
        ('COPY ["a b", "c"]', [copied("a b", to="c")]),
        ("COPY /a b", [copied("a", to="b")]),
        ("ARG V=1\nCOPY dist-$V /d", [Argument("V", "1"), copied("dist-1", to="/d")]),
        ("ARG V", []),
        ("ARG V=${W:-2}", [Argument("V", "2")]),
        ("ENV V=3\nCOPY ${V} x", [env(("V", "3")), copied("3", to="x")]),
    ],
)
def test_instructions_become_steps(text: str, steps: list[Step]) -> None:
    assert list(parse(f"FROM base\n{text}\n", context=CONTEXT).steps) == steps


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("FROM python:3.11", "python:3.11"),
        ("ARG V=3.11\nFROM python:$V", "python:3.11"),
        ("ARG V=3.11\nFROM python:${V}-slim AS base", "python:3.11-slim"),
        ("FROM --platform=linux/amd64 python", "python"),
        ("# syntax=docker/dockerfile:1\nFROM python", "python"),
        ("\ufeffFROM python", "python"),
    ],
)
def test_from_names_the_base_image(text: str, reference: str) -> None:
    assert parse(text, context=CONTEXT).reference == reference


def test_an_argument_overrides_its_default() -> None:
    parsed = parse("ARG V=1\nFROM python:$V\nARG V\nARG W=x", context=CONTEXT, arguments={"V": "2"})
    assert parsed.reference == "python:2"
    assert parsed.steps == (Argument("V", "2"), Argument("W", "x"))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("FROM a\nUSER me", 2, "USER is not supported: steps run as the user of the worker"),
        ("FROM a\nADD x y", 2, "ADD is not supported"),
        ("FROM a\n\n\nCMD run", 4, "CMD is not supported: only FROM, RUN, ENV, COPY, WORKDIR and ARG"),
        ("FROM a\nRUN x \\\n  y\nEXPOSE 80", 4, "EXPOSE is not supported"),
        ("FROM a\nFROM b", 2, "a second FROM is not supported"),
        ("RUN x", 1, "RUN comes before FROM"),
        ("FROM a\nRUN --mount=type=cache,target=/x make", 2, "RUN --mount=type=cache,target=/x is not supported"),
        ("FROM a\nCOPY --from=b x y", 2, "COPY --from=b is not supported"),
        ("FROM a\nRUN <<EOF\nx\nEOF", 2, "here-documents"),
        ("FROM a\nCOPY ../x y", 2, "../x is outside the Dockerfile's directory"),
        ("FROM a\nCOPY x", 2, "COPY needs a source and a destination"),
        ("FROM a\nCOPY x y z", 2, "must end with /"),
        ("FROM a\nCOPY $NAME y", 2, "$NAME has no value"),
        ("FROM a:$V", 1, "$V has no value"),
        ("FROM a\nENV 1A=2", 2, "'1A' is not a valid variable name"),
        ("FROM a\nENV A", 2, "ENV A has no value"),
        ('FROM a\nENV A="b', 2, "unclosed quote"),
        ("FROM a\nENV A=${B%%.*}", 2, "${B%%.*} is not supported: use ${A}"),
        ("FROM a\nENV A=${B:?unset}", 2, "${B:?unset} is not supported"),
        ("FROM a\nWORKDIR ${B-b}/c", 2, "${B-b}/c is not supported"),
        ("FROM a\nRUN", 2, "RUN has no arguments"),
        ("# escape=`\nFROM a", 1, "escape=` is not supported: use \\"),
        ("", 1, "FROM is missing"),
    ],
)
def test_what_cannot_run_in_a_pod_is_rejected_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(DockerfileError) as caught:
        parse(text, context=CONTEXT, name="deploy/Dockerfile")
    assert caught.value.line == line
    assert str(caught.value).startswith(f"deploy/Dockerfile, line {line}: ")
    assert message in str(caught.value)
