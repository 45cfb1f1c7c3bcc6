"""Takes the pictures of the page that are in the docs, of a job that does not exist.

python -m tests.client.ui.pictures docs/pictures
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshgate.ui.server import Feed
from meshgate_wire.handshake import SOFTWARE_VERSION
from meshgate_wire.status import EndedRanks, Straggler
from tests.chromium import started_chromium
from tests.client.ui.conftest import serving
from tests.client.ui.sources import FakeSource, printed, timeline

HOSTS, MANY_HOSTS, GPUS, LOST, LATE = 4, 128, 8, 19, 5
WIDE, NARROW = {"width": 1100, "height": 860}, {"width": 390, "height": 844}
REPLIES = [1.02 + 0.004 * (7 * rank % 11) for rank in range(HOSTS * GPUS)]
REPLIES[LATE] = 1.83  # seconds
HISTORY = """() => {  // 14 minutes, in which rank 5 computes longer than the others
  const now = past.at.at(-1);
  past.at.length = 0; past.of.clear();
  for (let at = 0; at <= 840; at++)
    remember(now - 840 + at, new Map(used.map(({ key, rank, values: [cpu, , , kept] }) => {
      const waits = rank === 5 ? 0 : (7 * rank + at) % 200 < 60 ? 60 : 2;
      const memory = (6 + (rank % 3) + at / 400) * 1e9;
      return [key, Number.isNaN(cpu) ? [NaN, NaN, NaN, kept] : [cpu - waits, memory, 93 - waits, kept]];
    })));
}"""


def example(hosts: int) -> FakeSource:
    source = FakeSource(hosts, GPUS)
    ranks = [rank for rank in range(hosts * GPUS) if rank != LOST]
    source.make_sound()
    killed = EndedRanks(
        ranks=((LOST, LOST),), reason="killed by SIGKILL (out of memory?)", exit_code=-9, age=130, last_age=130
    )
    for mesh in (0, 1):
        source.end_ranks(mesh, killed, dead={LOST: "the process was killed by signal 9 (SIGKILL)"})
    late = Straggler(rank=LATE, host="workers-0", calls=86, seconds=69.8)
    source.call("step", ended=9_400, seconds=8_100.0, compared=100, stragglers=(late,))
    call = timeline(7, *REPLIES, straggler=LATE)
    replies = tuple(each.model_copy(update={"host": f"workers-{each.rank // GPUS}"}) for each in call.replies)
    source.show_timelines(call.model_copy(update={"replies": replies}))
    (session,) = source.reported.sessions
    procs, actors = session.meshes
    procs = procs.model_copy(update={"kept": len(ranks) * 4**11, "kept_by_rank": dict.fromkeys(ranks, 4**11)})
    session = session.model_copy(update={"name": "train", "meshes": (procs, actors)})
    source.reported = source.reported.model_copy(update={"gateway_version": SOFTWARE_VERSION, "sessions": (session,)})
    source.lines = [printed(step, f"step {step} loss {2.0 / step:.3f}", step % GPUS) for step in range(1, 9)]
    source.used = [("procs", rank, 99.0, (8 + rank % 3) * 10**9, 93.0, 61 * 10**9) for rank in ranks]
    return source


@contextlib.contextmanager
def shown(browser: Any, hosts: int = HOSTS, **options: Any) -> Iterator[Any]:
    """The page, in which a rank is chosen."""
    source = example(hosts)
    with serving(Feed(source, "KubernetesJob(ml/trainer)", source.stack, source.meter)) as link:
        page = browser.new_page(**{"viewport": WIDE, "color_scheme": "light", **options})
        page.goto(link)
        page.get_by_role("button", name="Measure").click()
        page.wait_for_selector("#use :text('99%')")
        page.get_by_role("button", name=f"rank {LATE}, up, workers-0").click()
        page.evaluate(HISTORY)
        page.evaluate("showUse()")
        yield page


def take(directory: Path) -> None:
    pictures: dict[str, dict[str, Any]] = {
        "light": {},
        "dark": {"color_scheme": "dark"},
        "narrow": {"viewport": NARROW},
        "1024_ranks": {"hosts": MANY_HOSTS},
    }
    with started_chromium() as browser:
        for name, options in pictures.items():
            with shown(browser, **options) as page:
                page.screenshot(path=directory / f"ui_{name}.png")
        with shown(browser) as page:
            page.locator("#timelines button").first.click()
            page.locator("section", has=page.locator("#timelines")).screenshot(path=directory / "ui_timeline.png")


if __name__ == "__main__":
    take(Path(sys.argv[1]))
