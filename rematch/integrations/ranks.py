"""What trainers know about several processes: each rank trains a first batch, so one plan can serve all.

`share_first_batch(planned, options)`
"""

from __future__ import annotations

from typing import Any

from torch import nn

from rematch.execute.module import runner_of


def share_first_batch(planned: nn.Module, options: dict[str, Any]) -> None:
    """Have rank 0 plan the first batch for all ranks, unless the options of `remat` say share=False."""
    runner = runner_of(planned)
    assert runner is not None
    runner.shares_first_call = bool(options.get("share", True))
