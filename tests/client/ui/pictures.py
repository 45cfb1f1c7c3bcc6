"""Takes the pictures of the page that are in the docs, of a job of 32 ranks that does not exist.

python -m tests.client.ui.pictures docs/pictures
"""

from __future__ import annotations

import sys
from pathlib import Path

from meshgate.ui.server import Feed
from meshgate_wire.status import Straggler
from tests.chromium import started_chromium
from tests.client.ui.conftest import serving
from tests.client.ui.sources import FakeSource, printed

HOSTS, GPUS, LOST, LATE = 4, 8, 19, 5
SIZE = {"width": 1100, "height": 860}
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


def example() -> FakeSource:
    source = FakeSource(HOSTS, GPUS)
    source.make_sound({LOST: "the process was killed by signal 9 (SIGKILL)"})
    late = Straggler(rank=LATE, host="workers-0", calls=86, seconds=69.8)
    source.call("step", ended=9_400, seconds=8_100.0, compared=100, stragglers=(late,))
    source.lines = [printed(step, f"step {step} loss {2.0 / step:.3f}", step % GPUS) for step in range(1, 9)]
    ranks = [rank for rank in range(HOSTS * GPUS) if rank != LOST]
    source.used = [("procs", rank, 99.0, (8 + rank % 3) * 10**9, 93.0, 61 * 10**9) for rank in ranks]
    return source


def take(directory: Path) -> None:
    with started_chromium() as browser:
        for scheme in ("light", "dark"):
            source = example()
            feed = Feed(source, "KubernetesJob(ml/trainer)", source.stack, source.meter)
            with serving(feed) as link:
                page = browser.new_page(viewport=SIZE, color_scheme=scheme)
                page.goto(link)
                page.get_by_role("button", name="Measure").click()
                page.wait_for_selector("#use :text('99%')")
                page.get_by_role("button", name=f"rank {LATE}, up").click()
                page.evaluate(HISTORY)
                page.evaluate("showUse()")
                page.screenshot(path=directory / f"ui_{scheme}.png")


if __name__ == "__main__":
    take(Path(sys.argv[1]))
