"""A hook of mkdocs: writes llms.txt (https://llmstxt.org), and each page as Markdown beside its HTML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_SENTENCE = re.compile(r"^(?!#)(\S.*?[.:])(?:\s|$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_LABEL = re.compile(r"^\*\*\w+\.\*\* ", re.MULTILINE)

_pages: dict[str, str] = {}
_sections: list[tuple[str, list[Any]]] = []


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    _sections[:] = [("Start", nav.pages[:1])]
    _sections.extend((section.title, section.children) for section in nav.items if section.is_section)
    return nav


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    _pages[page.file.src_uri] = markdown
    return markdown


def on_post_build(config: Any) -> None:
    site = Path(config["site_dir"])
    for uri, markdown in _pages.items():
        (site / uri).write_text(markdown)
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for title, pages in _sections:
        lines += ["", f"## {title}", ""]
        lines += [f"- [{page.title}]({page.file.src_uri}): {summary(_pages[page.file.src_uri])}" for page in pages]
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
    (site / "llms-full.txt").write_text("\n\n".join(_pages.values()))


def summary(markdown: str) -> str:
    """The first sentence below the title, without links and a label such as **Decision.**"""
    found = _SENTENCE.search(_LABEL.sub("", _LINK.sub(r"\1", markdown)))
    return re.sub(":$", ".", " ".join(found[1].split())) if found else ""
