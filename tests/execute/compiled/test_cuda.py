"""What only a CUDA card has: inductor's tuning of products, CUDA graphs, and groups of processes that talk by NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.execute.compiled.on_a_card import CASES

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card and a torch built for it")
ROOT = Path(__file__).parents[3]
_FAR = 1e-3  # of the norm of a gradient; kernels differ from eager mode's in the order of their sums


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_a_transformer_trains_within_its_budget(case: str, tmp_path: Path) -> None:
    """CUDA graphs have a pool of memory of their own, which keeps what the recorded step took: that step is measured.

    Each case has a process: CUDA graphs and the expandable segments that rematch asks for elsewhere do not mix.
    """
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "REMATCH_CACHE": str(tmp_path / "rematch")}
    command = [sys.executable, "-W", "ignore", "-m", "tests.execute.compiled.on_a_card", case]
    done = subprocess.run(command, env={**os.environ, **caches}, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["distance"] < _FAR
    assert found["recomputed"], found["history"]
    assert found["peak"] <= found["budget"] < found["kept"], found["history"]
