"""Two processes that train together, for tests.

`results = of_two_ranks("tests.execute.two_ranks", folder, ["stages"])`
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
Results = dict[str, list[dict[str, Any]]]  # by case and rank


def of_two_ranks(module: str, folder: Path, cases: list[str]) -> Results:
    """Run `python -m module FOLDER CASE ...` as ranks 0 and 1, in an environment as of torchrun; what they wrote."""
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    environment = {**os.environ, **together, "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder), *cases],
            cwd=ROOT,
            env={**environment, "PYTHONPATH": str(ROOT), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return {case: [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(2)] for case in cases}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
