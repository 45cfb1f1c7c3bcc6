"""The command: looks at the job every few seconds, and shows what happened since."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from meshgate.cli.console import AsJson, Job, Namespace, console
from meshgate.cli.models import Top
from meshgate.cli.top.rates import compare
from meshgate.cli.top.view import Order, render
from meshgate.jobs.find import find_job
from meshgate.jobs.trait import JobTrait
from meshgate.ranks.usage.meter import UsageMeter

FIRST_INTERVAL = 1.0  # seconds; the first look shows something soon


def show_top(
    job: Job = None,
    interval: Annotated[float, typer.Option("--interval", min=0.5, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and exit.")] = False,
    order: Annotated[Order, typer.Option("--sort", help="The order of the ranks.")] = "rank",
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Show calls per second, latency, CPU, memory and GPUs, live.

    On a pipe, prints a look below the other; with --json, one object on each line.
    """
    found = find_job(job, namespace)
    with UsageMeter(found._state()._hosts) as meter:
        looks = look(found, meter, min(interval, FIRST_INTERVAL), interval)
        if once:
            looks = iter([next(looks)])
        show(looks, repr(found), once=once, order=order, as_json=as_json)


def look(job: JobTrait, meter: UsageMeter, first: float, interval: float) -> Iterator[Top]:
    """What happened in each interval, without end."""
    meter.read()
    before, since = job.status(), time.monotonic()
    due = since + first
    while True:
        time.sleep(max(0.0, due - time.monotonic()))
        usage, now, at = meter.read(), job.status(), time.monotonic()
        yield compare(before, now, at - since, usage)
        before, since = now, at
        due = max(due + interval, at)


def show(looks: Iterator[Top], title: str, *, once: bool, order: Order, as_json: bool) -> None:
    screen = Console(highlight=False)
    if as_json:
        for top in looks:
            typer.echo(top.model_dump_json(indent=2 if once else None))
    elif once or not screen.is_terminal or screen.is_dumb_terminal:
        plain = console()
        for top in looks:
            plain.print(render(top, title, width=plain.width, order=order))
            sys.stdout.flush()
    else:
        with Live(console=screen, screen=True, auto_refresh=False) as live:
            for top in looks:
                shown = render(top, title, width=screen.width, height=screen.height, order=order)
                live.update(shown, refresh=True)
