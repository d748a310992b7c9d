"""What MkDocs needs beyond docs/: pages that live at the root of the repository, and the results of benchmarks.

The README is the first page, and the pages on contributing and changes are the files that GitHub shows. Links are
written so that they work on GitHub; here they are turned into links of the site. Links to sources become plain code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
RESULTS = "benchmarks/results/"
LINK = re.compile(r"(?P<bang>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root and the pictures and figures of the benchmarks."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for result in sorted((ROOT / RESULTS).iterdir()):
        files.append(File.generated(config, f"results/{result.name}", abs_src_path=str(result)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links that work on GitHub into links of the site."""
    source = page.file.src_uri
    of_root = {page: name for name, page in ROOT_PAGES.items()}.get(source)
    folder = ROOT if of_root else (ROOT / "docs" / source).parent
    return LINK.sub(lambda match: _link(match, folder, source), markdown)


def _link(match: re.Match[str], folder: Path, source: str) -> str:
    target, _, anchor = match["target"].partition("#")
    if not target or "://" in target:
        return match[0]
    found = (folder / target).resolve()
    if not found.exists() or not found.is_relative_to(ROOT):
        return match[0]  # MkDocs warns of it
    name = found.relative_to(ROOT).as_posix()
    if name in ROOT_PAGES:
        name = ROOT_PAGES[name]
    elif name.startswith(RESULTS):
        name = f"results/{name.removeprefix(RESULTS)}"
    elif name.startswith("docs/"):
        name = name.removeprefix("docs/")
    else:
        return f"`{name}`"
    up = "../" * source.count("/")
    return f"{match['bang']}[{match['text']}]({up}{name}{'#' if anchor else ''}{anchor})"
