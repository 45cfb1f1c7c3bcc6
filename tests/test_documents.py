"""The documents are right about the repository, and their examples work."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import meshgate
from meshgate import Compute, KubernetesJob
from meshgate.cli.app import COMMANDS
from meshgate_gateway.provisioning.policy import Policy, read_policy, violations
from meshgate_kubernetes.manifests.spec import JobSpec
from tests.documents import DOCUMENTS, Block, code_blocks, python_blocks
from tests.programs import ROOT
from tests.test_structure import SOURCE_ROOTS

FOLDERS = "|".join([*SOURCE_ROOTS, "tests", "benchmarks", "examples", "docs", "deploy", ".ci"])
IN_THE_TREE = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
BLOCKS = [block for document in DOCUMENTS for block in python_blocks(document)]
SOURCES = [ROOT / name for name in SOURCE_ROOTS]


def blocks(language: str) -> list[Block]:
    return [block for document in DOCUMENTS for block in code_blocks(document, language)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_a_document_names_exists(document: Path) -> None:
    text = document.read_text()
    missing = [name for name in IN_THE_TREE.findall(text) if not (ROOT / name).exists()]
    missing += [name for name in LINK.findall(text) if not (document.parent / name).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_begins_with_its_title_after_any_front_matter(document: Path) -> None:
    text = document.read_text()
    if front_matter := re.match(r"---\n(.*?)\n---\n\n", text, re.DOTALL):
        assert isinstance(yaml.safe_load(front_matter[1]), dict)
        text = text[front_matter.end() :]
    assert text.startswith("# ")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_every_python_block_compiles(block: Block) -> None:
    code = block.code.rstrip()
    if code.endswith(":"):
        code += " ..."
    compile(code, str(block.document), "exec")


@pytest.mark.parametrize("block", blocks("sh"), ids=lambda block: block.name)
def test_every_shell_block_parses_and_its_commands_exist(block: Block) -> None:
    parsed = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, check=False)
    assert parsed.returncode == 0, parsed.stderr
    for name, rest in re.findall(r"^ *meshgate ([a-z]\w*)(.*)", block.code, re.MULTILINE):
        command = COMMANDS[name].load(name)
        options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        used = re.findall(r"(?<=\s)--?[a-z][\w-]*", re.split(r" -- |[|#>]", rest)[0])
        assert set(used) <= options | {"--help"}, block.code


def described(page: str) -> dict[str, set[str]]:
    """The options of each command that the table of options on docs/cli.md lists."""
    found: dict[str, set[str]] = {}
    for options, commands in re.findall(r"^\| (`-.*?) \| (`[a-z].*?) \| ", page, re.MULTILINE):
        for command in re.findall(r"`([a-z]+)`", commands):
            found.setdefault(command, set()).update(re.findall(r"`(--?[\w-]+)`", options))
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_on_the_command_line_has_every_command_and_option(name: str) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert f"`meshgate {name}" in page, f"docs/cli.md does not name `meshgate {name}`: add a row to its first table"
    params = COMMANDS[name].load(name).params
    options = {each for param in params for each in (*param.opts, *param.secondary_opts) if each.startswith("-")}
    listed = described(page).get(name, set())
    assert options <= listed, (
        f"docs/cli.md does not have {sorted(options - listed)} of `meshgate {name}`: add rows to its table of options"
    )
    assert listed <= options, f"`meshgate {name}` has no {sorted(listed - options)}: remove them from docs/cli.md"


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.name)
def test_every_yaml_block_parses(block: Block) -> None:
    list(yaml.safe_load_all(block.code))


@pytest.mark.parametrize("block", blocks("json"), ids=lambda block: block.name)
def test_every_json_block_parses(block: Block) -> None:
    json.loads(block.code)


def requested(block: Block, namespace: str) -> JobSpec:
    """The job that the block's first ``KubernetesJob(...)`` asks for, in the namespace that a reader would name."""
    calls = [node for node in ast.walk(ast.parse(block.code)) if isinstance(node, ast.Call)]
    first = next(call for call in calls if ast.unparse(call.func) == "KubernetesJob")
    job: KubernetesJob = eval(ast.unparse(first), {"Compute": Compute, "KubernetesJob": KubernetesJob})
    return job._request.spec("trainer").model_copy(update={"namespace": namespace})


def test_the_example_policy_accepts_the_program_of_the_guide_to_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHGATE_WORKER_IMAGE", raising=False)  # that of the cluster tests
    (block,) = [block for block in BLOCKS if block.document.name == "kubernetes.md" and block.is_program]
    policy = read_policy(ROOT / "deploy" / "provisioning-gateway" / "example" / "policy.json")
    assert violations(policy, requested(block, *policy.namespaces)) == []


def test_the_policy_of_the_guide_to_many_users_accepts_its_program() -> None:
    (values,) = [block for block in blocks("yaml") if block.document.name == "many_users.md"]
    policy = Policy(gateway_image="the chart's", **yaml.safe_load(values.code)["policy"])
    (program,) = [block for block in BLOCKS if block.document.name == "many_users.md" and "# train.py" in block.code]
    assert violations(policy, requested(program, *policy.namespaces)) == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.has_tests], ids=lambda block: block.name)
def test_tests_in_documents_pass(block: Block, tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(block.code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_api_reference_lists_every_public_name() -> None:
    reference = "".join(path.read_text() for path in (ROOT / "docs").glob("reference*.md"))
    documented = set(re.findall(r"^::: meshgate\.(\w+)$", reference, re.MULTILINE))
    documented |= set(re.findall(r"^        - (\w+)$", reference, re.MULTILINE))
    assert set(meshgate.__all__) - documented == set()


def test_every_class_that_the_glossary_names_exists() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    named = set(re.findall(r"`([A-Z]\w+)`", glossary))
    sources = "\n".join(path.read_text() for root in SOURCES for path in root.rglob("*.py"))
    assert {name for name in named if not re.search(rf"^class {name}\b", sources, re.MULTILINE)} == set()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f" {page}" not in navigation] == []


def test_every_error_in_troubleshooting_is_one_of_the_sources() -> None:
    quoted = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    sources = [path.read_text() for root in SOURCES for path in root.rglob("*.py")]
    assert len(quoted) > 10
    assert [text for text in quoted if not any(text in source for source in sources)] == []


def test_troubleshooting_has_every_public_error() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    public = {name: getattr(meshgate, name) for name in meshgate.__all__}
    errors = {name for name, each in public.items() if isinstance(each, type) and issubclass(each, BaseException)}
    assert {name for name in errors if f"`{name}`" not in page} == set()


@pytest.mark.parametrize(
    ("page", "summary"),
    [
        ("# Jobs\n\nA [job](jobs.md) gives a\nprogram its hosts. It ends.\n", "A job gives a program its hosts."),
        ("# Images\n\nAn image defines what runs:\n\n```python\nImage()\n```\n", "An image defines what runs."),
        ("# Engines\n\n**Decision.** One engine per session. Why:\n", "One engine per session."),
        ("# Empty\n", ""),
    ],
)
def test_the_summary_of_a_page_for_machines_is_its_first_sentence(page: str, summary: str) -> None:
    spec = importlib.util.spec_from_file_location("llms_txt", ROOT / "docs" / "llms_txt.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    assert hook.summary(page) == summary
