"""The pages of docs/: all of them are in the site, links lead somewhere, examples run, and what they quote is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import rematch
from rematch import errors
from tests.pages import DOCS, ROOT, python_blocks

PAGES = sorted(DOCS.rglob("*.md"))
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def in_nav(entries: Any) -> Iterator[str]:
    for entry in entries:
        for found in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [found] if isinstance(found, str) else in_nav(found)


def test_every_page_is_in_the_navigation_once() -> None:
    pages = [page.relative_to(DOCS).as_posix() for page in PAGES]
    assert sorted(in_nav(SITE["nav"])) == sorted([*pages, "index.md", "contributing.md", "changelog.md"])


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", [*ROOT_PAGES, *PAGES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" not in link:
            target, _, anchor = link.partition("#")
            found = page.parent / target if target else page
            assert found.exists(), link
            assert not anchor or anchor in anchors_of(found), link


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_examples_can_be_read(page: Path) -> None:
    for block in python_blocks(page):
        compile(block, page.name, "exec")


@pytest.mark.slow
def test_the_quick_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path))
    scope: dict[str, Any] = {}
    for block in python_blocks(DOCS / "quickstart.md"):
        exec(block, scope)
    printed = capsys.readouterr().out
    assert str(scope["plan"]) in printed
    assert "the smallest that was found to work is" in printed
    assert float(printed.splitlines()[-1]) <= 0.61


def test_looking_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "docs"}
    for block in python_blocks(DOCS / "planning.md"):
        exec(block, scope)
    assert {path.name for path in tmp_path.iterdir()} == {"memory.svg", "curve.svg"}
    assert {entry.name.partition("_")[0] for entry in scope["plan"].recomputed} >= {"gelu"}
    assert scope["largest"].batch > scope["largest"].without_recomputation


def test_a_partitioner_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = python_blocks(DOCS / "hierarchy.md")
    exec(block, {"__name__": "docs"})
    assert capsys.readouterr().out.strip() in ("Status.FEASIBLE", "Status.OPTIMAL")


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^::: ([\w.]+)$", text_of(DOCS / "api.md"), flags=re.MULTILINE)
    for name in listed:
        module, _, attribute = name.rpartition(".")
        assert name == "rematch.errors" or hasattr(import_module(module), attribute), name
    verbs = {f"rematch.{name}" for name, home in rematch._LAZY.items() if home != "rematch"}
    assert verbs <= set(listed)


def strings_of_sources() -> str:
    """All text between the placeholders of all strings of the package, each a line, with single spaces."""
    found = []
    for path in sorted((ROOT / "rematch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(" ".join(node.value.split()))
    return "\n".join(found)


def test_every_error_is_explained_and_every_message_is_one_of_ours() -> None:
    page = text_of(DOCS / "errors.md")
    classes = [
        name for name, kind in vars(errors).items() if isinstance(kind, type) and kind.__module__ == "rematch.errors"
    ]
    assert [name for name in classes if f"| `{name}` |" not in page] == []
    assert [name for name in classes if name != "RematchError" and f"## {name}\n" not in page] == []
    strings = strings_of_sources()
    explained = page.partition("## BudgetError")[2]
    for first_column in re.findall(r"^\| (`.+?) \| ", explained, flags=re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", first_column):
            for fragment in message.split("…"):
                assert fragment.strip(" .'") in strings, message


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs what make site installs: pip install '.[docs]'")
    pytest.importorskip("mkdocstrings", reason="needs what make site installs: pip install '.[docs]'")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    run = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Make <code>model</code> train inside" in (tmp_path / "api.html").read_text(encoding="utf-8")
