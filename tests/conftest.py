"""Settings for all tests. Examples have no deadline: a kernel being compiled or a busy machine is not their fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from rematch.planning import planner
from tests.examples import examples

# Some virtual machines announce AMX and do not have it: there plain torch dies of an illegal instruction in a bfloat16
# product. oneDNN reads this before its first product; processors without AMX are not concerned.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

settings.register_profile("rematch", examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rematch")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured costs are shared among the tests of one run, and never with the user's. Every test makes its plans."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMATCH_CACHE", str(tmp_path_factory.mktemp("costs")))
        patch.setenv("REMATCH_PLAN_CACHE", "off")
        patch.setattr(planner, "_MINIMUM_SECONDS", 2.0)  # for the smallest budget that a refusal names
        yield


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM do what they do in a terminal. Whoever runs the tests in the background may ignore them."""
    ordinary = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in ordinary.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
