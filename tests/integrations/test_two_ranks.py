"""Trainers with two processes: one plan for both, and the weights of plain data parallel training, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.processes import of_two_ranks

CASES = ["hugging_face", "accelerate", "lightning"]


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="needs a torch built with distributed training")
@pytest.mark.xdist_group("two ranks")
def test_trainers_share_a_plan_and_change_no_bit(tmp_path: Path) -> None:
    for case, (first, second) in of_two_ranks("tests.integrations.two_ranks", tmp_path, CASES).items():
        assert first["equal"] and second["equal"], case
        assert first["recomputed"] > 0, case
        assert first["schedule"] == second["schedule"], case
