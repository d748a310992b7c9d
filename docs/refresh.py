"""Run the commands that docs/graphs.md shows and put what they print, and the picture, in their place: `make docs`.

A console block of the page is a line `$ rematch ...` and its output. The blocks run one after another in one folder,
so that a later one finds the files of an earlier one. What they print depends on the machine: look before committing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "graphs.md"
PICTURE = ROOT / "docs" / "schedule.png"
DRAW = f"rematch show plan.json --graph gpt.json --plot '{PICTURE}'"
CONSOLE_BLOCK = re.compile(r"(?<=```console\n)\$ (?P<command>[^\n]+)\n.*?(?=```)", flags=re.DOTALL)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = CONSOLE_BLOCK.sub(lambda block: shown(block["command"], folder), PAGE.read_text(encoding="utf-8"))
        output_of(DRAW, folder)
    PAGE.write_text(text, encoding="utf-8")


def shown(command: str, folder: str) -> str:
    print(f"$ {command}")
    return f"$ {command}\n{output_of(command, folder)}"


def output_of(command: str, folder: str) -> str:
    """What a command prints; for one that is meant to fail, the line on standard error."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        command, shell=True, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )  # fmt: skip
    if run.returncode not in (0, 2):
        sys.exit(f"{command}: exit status {run.returncode}\n{run.stderr}")
    return run.stdout or run.stderr


if __name__ == "__main__":
    main()
