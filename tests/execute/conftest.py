"""Settings for tests that train: one thread, the same random numbers, and nothing compiled by an earlier test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import rematch
from rematch import api
from rematch.planning.settings import REPLAY, TAPE

_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card and a torch built for it"),
]
# Without it cuBLAS is not deterministic; the smaller of its workspaces, so that it does not dwarf the models.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")  # KiB: what the line above asks for, or it warns


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=_CUDA)], scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the promises hold for."""
    return torch.device(request.param)


@pytest.fixture(params=[TAPE, REPLAY])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each engine that the promises hold for, as the one that `remat` takes.

    A module of tests asks for both by `pytestmark = pytest.mark.usefixtures("engine")`; a test that is about one of
    them says so by `@pytest.mark.parametrize("engine", ["tape"], indirect=True)`.
    """
    monkeypatch.setattr(api, "DEFAULT_ENGINE", request.param)
    return str(request.param)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Replay refuses what torch.compile traces to other kernels than eager's: there is nothing to test then."""
    try:
        return (yield)
    except rematch.CaptureError as refused:
        if "is not what eager runs" in str(refused) and "replay" in item.nodeid:
            pytest.skip("replay refuses this module; a torch that traces eager's kernels for it would unskip this")
        raise


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Kernels this small gain nothing from threads, and on a busy machine lose to waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
