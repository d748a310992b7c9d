"""Devices that rematch does not train on are refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rematch
from rematch.errors import DeviceError


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a device this build of PyTorch does not have."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} was called")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


@pytest.mark.parametrize("kind", ["mps", "xpu", "privateuseone"])
def test_other_accelerators_are_refused_before_anything_runs(kind: str) -> None:
    sample = torch.Tensor._make_wrapper_subclass(Elsewhere, (4, 8), dtype=torch.float32, device=kind)  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match=rf"does not train on '{kind}'.*CPU, CUDA and ROCm"):
        rematch.remat(model(), sample, budget="60%")


def test_the_meta_device_needs_the_name_of_another() -> None:
    sample = torch.ones(4, 8, device="meta")
    with pytest.raises(DeviceError, match=r"no operator can be measured.*h100"):
        rematch.plan(model().to("meta"), sample, budget="100%")
    assert rematch.plan(model().to("meta"), sample, budget="100%", device="h100").figures.peak_bytes
