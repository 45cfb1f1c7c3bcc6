"""A notebook with a real kernel and a real job."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import meshgate

pytestmark = pytest.mark.any_release

CELLS = {
    "start": """
        import asyncio, os, signal, sys, threading, time
        from meshgate import Actor, ProcessJob, endpoint
        from meshgate.session.output import printer

        printer.PRINT_TIMEOUT = 30  # results wait for printing, however busy the machine is

        class Trainer(Actor):
            @endpoint
            def say(self, text: str) -> str:
                print(text, flush=True)
                return text

            @endpoint
            def fail(self) -> None:
                raise ValueError("bad batch")

            @endpoint
            def count(self, cell: int) -> None:
                for number in range(8):
                    print(f"line {number} of cell {cell}")

        class Waiter(Actor):
            @endpoint
            async def hang(self) -> None:
                await asyncio.Event().wait()

            @endpoint
            async def is_free(self) -> str:
                return "is free"

        def say(text):
            # waits until the output is printed
            end, shown, printed = text.rpartition("\\r")[2], [], threading.Event()

            def write(text, original=sys.stdout.write):  # IPython replaces it in each cell
                shown.append(text)
                if end in "".join(shown):
                    printed.set()
                return original(text)

            sys.stdout.write = write
            result = trainers.say.call(text).get()
            assert printed.wait(60)
            return result

        job = ProcessJob({"workers": 1})
        procs = job.state(None).workers.spawn_procs()
        trainers = procs.spawn("trainers", Trainer)
        """,
    "call": "say('first <cell>')",
    "another call": "say('second cell');",
    "bar": "say('\\r10% of it\\r2%');",
    **{f"lines {cell}": f"trainers.count.call({cell}).get();" for cell in range(5)},
    "mesh": "trainers",
    "job": "job",
    "future": "future = trainers.say.call('z'); future.get(); future",
    "await": "len(await trainers.say.call('y'))",
    "failed": """
        def train():
            trainers.fail.call().get()

        train()
        """,
    "awaited and failed": "await trainers.fail.call()",
    "mistaken": """
        def evaluate():
            return procs.initialized + 1

        evaluate()
        """,
    "defect": """
        from meshgate.session.futures import FutureProxy

        unsettled = FutureProxy()
        unsettled._results.append(1)
        unsettled.validate_state()
        """,
    "blocked loop": """
        async def block():
            return trainers.say.call('x').get()

        len(await block())
        """,
    "interrupted": """
        waiters = procs.spawn("waiters", Waiter)
        hangs = waiters.hang.call()

        def interrupt():
            deadline = time.monotonic() + 60
            while not stopped.wait(0.01) and time.monotonic() < deadline:
                if hangs._wakers:
                    os.kill(os.getpid(), signal.SIGINT)  # the button that stops a cell
                    stopped.wait(30)  # a finalizer may swallow it

        stopped = threading.Event()
        threading.Thread(target=interrupt).start()
        try:
            hangs.get()
        finally:
            stopped.set()
        """,
    "after the interrupt": "waiters.is_free.call().get()",
    "progress": """
        import IPython.display, ipywidgets
        from meshgate.jobs.kubernetes.display import choose_display
        from meshgate.jobs.slurm.job import choose_progress

        shown = threading.Semaphore(0)

        def display(what, *more, original=IPython.display.display, **options):
            original(what, *more, **options)
            if isinstance(what, ipywidgets.Output):
                shown.release()

        IPython.display.display = display
        with choose_progress() as progress:
            progress.show("2 of 4 workers are connected")
            assert shown.acquire(timeout=30)
        with choose_display("job") as progress:
            progress.activity("deleting 4 objects")
            assert shown.acquire(timeout=30)
        """,
    "end": "job.kill()",
}
"""Cells by name. Each runs on the kernel's event loop."""


def timeout_of(cell: Any) -> int:
    """In seconds. For output widgets nbclient sends to the kernel on the socket on which it waits for the reply. It may
    then notice a reply only when this time is over: jupyter_client sends past pyzmq's event loop."""
    return 30 if "ipywidgets" in cell.source else 110


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The outputs of each cell."""
    pytest.importorskip("ipykernel")
    nbclient = pytest.importorskip("nbclient")  # here: it takes 1.2 s of processor time, as nbformat does
    nbformat = pytest.importorskip("nbformat")
    made = [nbformat.v4.new_code_cell(textwrap.dedent(source).strip()) for source in CELLS.values()]
    for name in ("failed", "awaited and failed", "mistaken", "defect", "interrupted"):
        made[list(CELLS).index(name)].metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=made)
    with pytest.MonkeyPatch.context() as environment:
        for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # no files in the home directory
            environment.setenv(variable, str(tmp_path_factory.mktemp(variable)))
        environment.delenv("MESHGATE_PROGRESS", raising=False)
        nbclient.NotebookClient(notebook, timeout_func=timeout_of, kernel_name="python3").execute()
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}


def stream(outputs: list[dict[str, Any]], name: str = "stdout") -> str:
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream" and output["name"] == name)


def html(outputs: list[dict[str, Any]]) -> str:
    (result,) = [output for output in outputs if output["output_type"] == "execute_result"]
    return str(result["data"]["text/html"])


def test_plain_cells_and_await_warn_of_nothing(cells: dict[str, list[dict[str, Any]]]) -> None:
    assert {name for name, outputs in cells.items() if stream(outputs, "stderr")} == {"blocked loop", "interrupted"}


def test_blocking_in_a_coroutine_warns(cells: dict[str, list[dict[str, Any]]]) -> None:
    assert "Use `await future`" in stream(cells["blocked loop"], "stderr")


def test_output_is_under_the_cell_that_made_the_call(cells: dict[str, list[dict[str, Any]]]) -> None:
    assert "first <cell>" in stream(cells["call"])
    assert "second cell" not in stream(cells["call"])
    assert "second cell" in stream(cells["another call"])


def test_all_that_a_cell_made_actors_print_is_under_it(cells: dict[str, list[dict[str, Any]]]) -> None:
    for cell in range(5):
        lines = stream(cells[f"lines {cell}"]).splitlines()
        assert [line.partition("] ")[2] for line in lines] == [f"line {number} of cell {cell}" for number in range(8)]


def test_a_progress_bar_is_one_line(cells: dict[str, list[dict[str, Any]]]) -> None:
    assert stream(cells["bar"]).endswith("[workers-0 trainers rank 0] 2%\n")
    assert stream(cells["bar"]).count("\n") == 1


def test_stopping_a_cell_cancels_the_call_that_it_waits_for(cells: dict[str, list[dict[str, Any]]]) -> None:
    said = stream(cells["interrupted"], "stderr")
    assert said.startswith("\nmeshgate: interrupted while waiting for waiters.hang: ")
    assert said.endswith(". The call is cancelled\n")
    assert [output["ename"] for output in cells["interrupted"] if output["output_type"] == "error"] == [
        "KeyboardInterrupt"
    ]
    assert "is free" in html(cells["after the interrupt"])


def shown_error(outputs: list[dict[str, Any]]) -> str:
    (error,) = (output for output in outputs if output["output_type"] == "error")
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"]))


def test_a_defect_of_meshgate_shows_where_it_is(cells: dict[str, list[dict[str, Any]]]) -> None:
    shown = shown_error(cells["defect"])
    assert "unsettled.validate_state()" in shown
    assert str(Path(meshgate.__file__).parent) in shown


@pytest.mark.parametrize(
    ("cell", "line", "end"),
    [
        ("failed", "trainers.fail.call().get()", "ValueError: bad batch"),
        ("awaited and failed", "await trainers.fail.call()", "ValueError: bad batch"),
        ("mistaken", "return procs.initialized + 1", "read that first, with .get() or await"),
        ("interrupted", "hangs.get()", "KeyboardInterrupt: "),
    ],
)
def test_tracebacks_show_the_lines_of_the_notebook_alone(
    cells: dict[str, list[dict[str, Any]]], cell: str, line: str, end: str
) -> None:
    shown = shown_error(cells[cell])
    assert line in shown
    assert shown.endswith(end)
    assert str(Path(meshgate.__file__).parent) not in shown


def test_results_meshes_jobs_and_futures_are_html(cells: dict[str, list[dict[str, Any]]]) -> None:
    assert "<table" in html(cells["call"])
    assert "first &lt;cell&gt;" in html(cells["call"])
    assert "workers-0" in html(cells["mesh"])
    assert "__main__.Trainer" in html(cells["mesh"])
    assert "ProcessJob" in html(cells["job"])
    assert "hosts &#x27;workers&#x27;" in html(cells["job"])
    assert "state: done" in html(cells["future"])
    assert "<table" in html(cells["future"])


def test_the_progress_of_a_starting_job_is_a_widget(cells: dict[str, list[dict[str, Any]]]) -> None:
    shown = [output["data"] for output in cells["progress"] if output["output_type"] == "display_data"]
    widgets = [data for data in shown if "application/vnd.jupyter.widget-view+json" in data]
    assert len(widgets) == 2
