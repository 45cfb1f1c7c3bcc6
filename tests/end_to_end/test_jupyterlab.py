"""Notebooks as people use them: in JupyterLab, in Chromium. Left out where either is not installed.

``test_notebook.py`` shows what needs no browser, with the same kernel.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.chromium import CHROMIUM, started_chromium
from tests.ports import free_port
from tests.waiting import DEADLINE, wait_for

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.any_release,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("jupyterlab") is None, reason="JupyterLab is not installed"),
    pytest.mark.timeout(600),  # starts JupyterLab, a browser, a kernel and Monarch
]

START = """
import asyncio, pathlib, threading, time
from meshgate import Actor, ProcessJob, endpoint

def wait_for(file):
    while not pathlib.Path(file).exists():
        time.sleep(0.05)

class Trainer(Actor):
    @endpoint
    def say(self, text: str) -> str:
        print(text, flush=True)
        return text

    @endpoint
    def train(self, file: str) -> str:
        print("begins", flush=True)
        wait_for(file)
        print("is trained", flush=True)
        return "weights"

class Waiter(Actor):
    @endpoint
    async def hang(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    async def is_free(self) -> str:
        return "is free"

job = ProcessJob({"workers": 1}, detached=name)
procs = job.state(file).workers.spawn_procs(per_host={"gpus": 2})
trainers = procs.spawn("trainers", Trainer)
"""
ENDS_WITH_KERNEL = "name, file = False, None\n"
OUTLIVES_KERNEL = "name, file = 'night', '.monarch/job_state.pkl'\n"


class Notebook:
    """A notebook that is open in the browser. Its cells have names."""

    def __init__(self, page: Any, cells: Mapping[str, str]) -> None:
        self.page = page
        self._names = list(cells)

    def wait_idle(self) -> None:
        """Waits for the kernel: until it has started, JupyterLab drops what it is asked to run."""
        self.page.get_by_role("button", name="Python 3 (ipykernel) | Idle").wait_for()

    def restart(self) -> None:
        self.page.get_by_role("menuitem", name="Kernel", exact=True).click()
        self.page.get_by_role("menuitem", name=re.compile("^Restart Kernel…")).click()
        with self.page.expect_response(re.compile("/restart")):  # from its request on, the kernel is not idle
            self.page.get_by_role("button", name="Confirm Kernel Restart").click()
        self.wait_idle()

    def start(self, name: str) -> None:
        self._cell(name).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

    def wait_ended(self, name: str) -> None:
        playwright.expect(self._cell(name).locator(".jp-InputArea-prompt")).to_have_text(re.compile(r"\[\d+\]:"))

    def run(self, name: str) -> None:
        self.start(name)
        self.wait_ended(name)
        assert not self._cell(name).locator('[data-mime-type$="/vnd.jupyter.error"]').count(), self.text(name)

    def expect(self, name: str, text: str, kind: str = "vnd.jupyter.stdout") -> None:
        """Waits until an output of this kind (the end of its media type), under the cell, contains ``text``."""
        outputs = self._cell(name).locator(f'[data-mime-type$="/{kind}"]').filter(has_text=text)
        playwright.expect(outputs.first).to_be_visible()

    def text(self, name: str) -> str:
        """All that is under the cell."""
        return str(self._cell(name).locator(".jp-Cell-outputWrapper").inner_text())

    def _cell(self, name: str) -> Any:
        return self.page.locator(".jp-CodeCell").nth(self._names.index(name))


OpenNotebook: TypeAlias = Callable[[Mapping[str, str]], Notebook]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The directory of the notebooks, and the address of JupyterLab with a place for the name of one."""
    notebooks, runtime = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("runtime")
    environment = {**os.environ, "JUPYTER_RUNTIME_DIR": str(runtime)}
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):  # no files in the home directory
        environment[variable] = str(tmp_path_factory.mktemp(variable))
    environment.pop("MESHGATE_PROGRESS", None)
    options = [
        f"--ServerApp.port={free_port()}",
        "--ServerApp.port_retries=0",
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.allow_root=True",
        "--ServerApp.open_browser=False",
        "--LabApp.extension_manager=readonly",  # the default asks PyPI
        "--LanguageServerManager.autodetect=False",  # runs npm, which writes into the home directory
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    log = notebooks / "server.log"
    with log.open("w") as written:
        command = [sys.executable, "-m", "jupyterlab", *options]
        server = subprocess.Popen(command, cwd=notebooks, env=environment, stdout=written, stderr=written)
    file = runtime / f"jpserver-{server.pid}.json"

    def has_started() -> bool:
        assert server.poll() is None, log.read_text()
        return file.exists() and file.read_text().endswith("}")

    try:
        wait_for(has_started, "JupyterLab")
        found = json.loads(file.read_text())
        yield notebooks, f"{found['url']}lab/tree/{{}}?reset&token={found['token']}"
    finally:
        server.terminate()  # it ends its kernels
        try:
            server.wait(DEADLINE)
        finally:
            server.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started_chromium() as browser:
        yield browser


@pytest.fixture
def open_notebook(lab: tuple[Path, str], browser: Any, request: pytest.FixtureRequest) -> Iterator[OpenNotebook]:
    nbformat = pytest.importorskip("nbformat")  # here: it takes 1.2 s of processor time
    directory, address = lab
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    playwright.expect.set_options(timeout=DEADLINE * 1000)  # for the whole process
    context = browser.new_context(viewport={"width": 1400, "height": 2400})  # cells out of sight are not rendered

    def open_it(cells: Mapping[str, str]) -> Notebook:
        made = [nbformat.v4.new_code_cell(textwrap.dedent(source).strip()) for source in cells.values()]
        file = directory / f"{request.node.name}.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": kernel}), file)
        page = context.new_page()
        page.set_default_timeout(DEADLINE * 1000)
        page.goto(address.format(file.name))
        notebook = Notebook(page, cells)
        notebook.wait_idle()
        return notebook

    yield open_it
    context.close()
    playwright.expect.set_options(timeout=None)


def test_output_is_under_its_cell_whatever_the_variable_explorer_shows(
    open_notebook: OpenNotebook, tmp_path: Path
) -> None:
    notebook = open_notebook(
        {
            "start": ENDS_WITH_KERNEL + START,
            "first": "trainers.say.call('first').get()",
            "second": "trainers.say.call('second').get();",
            "mesh": "trainers",
            "later": f"call = trainers.train.call({str(tmp_path / 'go')!r})",
            "no call": "print('one'); 1 + 1",
            "end": "job.kill()",
        }
    )
    for cell in ("start", "first", "second", "mesh"):
        notebook.run(cell)
    notebook.expect("first", "first")
    notebook.expect("second", "second")
    assert "second" not in notebook.text("first")
    notebook.expect("first", "ValueMesh({hosts: 1, gpus: 2})", "html")
    notebook.expect("mesh", "Trainer", "html")

    notebook.run("later")
    notebook.expect("later", "begins")
    notebook.run("no call")
    notebook.page.locator(".jp-DebuggerBugButton").first.click()
    variables = notebook.page.locator(".jp-DebuggerVariables")
    variables.get_by_text("trainers", exact=True).click()
    playwright.expect(variables.get_by_text("initialized", exact=True)).to_be_visible()  # all properties were read
    (tmp_path / "go").touch()
    notebook.expect("later", "is trained")
    assert "is trained" not in notebook.text("no call")
    notebook.run("end")


def test_interrupt_frees_the_cell_and_says_what_it_waited_for(open_notebook: OpenNotebook) -> None:
    hang = """
        hangs = waiters.hang.call()

        def say_once_it_waits():
            while not hangs._wakers:
                time.sleep(0.05)
            print("waits")

        threading.Thread(target=say_once_it_waits).start()
        hangs.get()
        """
    notebook = open_notebook(
        {
            "start": ENDS_WITH_KERNEL + START + "waiters = procs.spawn('waiters', Waiter)",
            "hang": hang,
            "after": "waiters.is_free.call().get()",
            "end": "job.kill()",
        }
    )
    notebook.run("start")
    notebook.start("hang")
    notebook.expect("hang", "waits")
    notebook.page.locator('[data-command="notebook:interrupt-kernel"]').first.click()
    notebook.wait_ended("hang")
    notebook.expect("hang", "meshgate: interrupted while waiting for waiters.hang: ", "vnd.jupyter.stderr")
    assert notebook.text("hang").count("The call is cancelled") == 1
    notebook.run("after")
    notebook.expect("after", "is free", "html")
    notebook.run("end")


def test_a_restarted_kernel_attaches_to_the_detached_session(open_notebook: OpenNotebook, tmp_path: Path) -> None:
    notebook = open_notebook(
        {
            "start": OUTLIVES_KERNEL + START,
            "call": f"call = trainers.train.call({str(tmp_path / 'go')!r})",
            "attach": """
                import pathlib, threading, time
                from meshgate import ProcessJob

                job = ProcessJob({"workers": 1}, detached="night")
                session = job.attach()
                session.calls
                """,
            "result": f"""
                future = session.calls[0].future

                def go_once_it_waits():
                    while not future._wakers:
                        time.sleep(0.05)
                    pathlib.Path({str(tmp_path / "go")!r}).touch()

                threading.Thread(target=go_once_it_waits).start()
                future.get()
                """,
            "again": "session.actors['trainers'].say.call('again').get();",
            "end": "job.kill()",
        }
    )
    notebook.run("start")
    notebook.run("call")
    notebook.expect("call", "begins")
    notebook.restart()
    notebook.run("attach")
    assert "in flight" in notebook.text("attach")
    notebook.run("result")
    notebook.expect("result", "is trained")
    notebook.expect("result", "weights", "html")
    notebook.run("again")
    notebook.expect("again", "again")
    notebook.run("end")


def test_the_progress_of_a_starting_job_is_a_widget_that_leaves_one_line(
    open_notebook: OpenNotebook, tmp_path: Path
) -> None:
    notebook = open_notebook(
        {
            "progress": f"""
                import pathlib, time
                from meshgate.jobs.kubernetes.display import choose_display

                with choose_display("job") as progress:
                    progress.activity("waits for 2 pods")
                    while not pathlib.Path({str(tmp_path / "go")!r}).exists():
                        time.sleep(0.05)
                    progress.done("is up")
                """
        }
    )
    notebook.start("progress")
    widget = notebook.page.locator(".jupyter-widgets").filter(has_text="job waits for 2 pods")
    playwright.expect(widget).to_be_visible()
    (tmp_path / "go").touch()
    notebook.wait_ended("progress")
    notebook.expect("progress", "job is up", "html")
    playwright.expect(widget).to_have_count(0)
