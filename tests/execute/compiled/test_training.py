"""Training through inductor inside a budget, with its C++ backend: what is promised to who trains by torch.compile."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters

import rematch
from rematch.execute.compiled.backend import _backend_for, rematch_backend
from rematch.planning import planner
from rematch.trial import Trial, same_outcome
from tests.inductor_graphs import compile_eagerly, use_eager_kernels
from tests.modules import Net, batch, mean_square

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="inductor's CPU backend needs a C++ compiler: install g++",
)
SAMPLE = batch(512)


@pytest.fixture(scope="module", autouse=True)
def _own_inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What inductor compiled for an earlier run would not be planned again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def net() -> Net:
    torch.manual_seed(0)
    return Net(depth=2)


def trained(module: nn.Module, steps: int = 4) -> Trial:
    """The module after the steps that its plan is settled in."""
    trial = Trial(module, mean_square)
    for _ in range(steps):
        trial.step(SAMPLE)
    return trial


@needs_compiler
def test_budgets_are_kept_with_the_gradients_of_torch_compile() -> None:
    plain = net()
    alone = trained(torch.compile(copy.deepcopy(plain), dynamic=False))  # type: ignore[arg-type]
    alone_bytes = alone.peak_bytes(SAMPLE)

    kept = trained(rematch.remat(copy.deepcopy(plain), SAMPLE, budget=2 * alone_bytes, engine="compiled"))
    assert same_outcome(kept, alone, SAMPLE)
    assert kept.peak_bytes(SAMPLE) == alone_bytes
    (plan,) = rematch.plans_of(kept.model)
    assert plan.engine == "compiled" and not plan.recomputed

    budget = int(0.8 * alone_bytes)
    inside = rematch.remat(copy.deepcopy(plain), SAMPLE, budget=budget, engine="compiled", time_limit=2.0)
    tight = trained(inside)
    (plan,) = rematch.plans_of(inside)
    assert plan.recomputed
    assert tight.peak_bytes(SAMPLE) <= budget
    ours, theirs = gradients(tight), gradients(alone)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6)

    # In another process inductor has the graph already; the plan is there again, and nothing is solved.
    torch._dynamo.reset()
    counters.clear()
    again = rematch.remat(copy.deepcopy(plain), SAMPLE, budget=budget, engine="compiled", time_limit=2.0)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert rematch.plans_of(again)[0].schedule == plan.schedule


def gradients(trial: Trial) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    trial.step(SAMPLE)
    named = {name.removeprefix("_orig_mod."): p.grad for name, p in trial.model.named_parameters()}
    return {name: gradient.clone() for name, gradient in named.items() if gradient is not None}


@needs_compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, of a graph after a break
def test_as_a_backend_with_graph_breaks_and_without_gradients() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.first(x))
            torch._dynamo.graph_break()
            return torch.tanh(self.second(y))

    plain = Broken()
    options = {"budget": "1GiB", "epilogue_fusion": True}  # the second one is inductor's
    ours = torch.compile(plain, backend=rematch_backend, options=options, dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(ours(SAMPLE), plain(SAMPLE))
    for trial in (Trial(ours, mean_square), Trial(plain, mean_square)):  # type: ignore[arg-type]
        trial.step(SAMPLE)
    torch.testing.assert_close(ours(SAMPLE), plain(SAMPLE))


def test_a_budget_that_cannot_be_kept_is_refused_in_our_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_MINIMUM_SECONDS", 1.0)
    with pytest.raises(rematch.BudgetInfeasible, match="smallest that was found to work"):
        rematch.remat(net(), SAMPLE, budget="1KiB", engine="compiled", time_limit=1.0)


def test_a_plan_for_another_graph_is_refused() -> None:
    plan = rematch.plan(net(), SAMPLE, budget="80%", engine="tape", time_limit=1.0)
    compiled = copy.copy(plan)
    object.__setattr__(compiled, "engine", "compiled")
    with pytest.raises(rematch.ScheduleError, match="another graph"):
        rematch.apply(net(), compiled, SAMPLE)


def test_options_need_a_budget() -> None:
    with pytest.raises(Exception, match="needs a budget"):
        torch.compile(net(), backend=rematch_backend)(SAMPLE)


def test_a_mode_of_inductor_goes_into_the_options() -> None:
    backend = _backend_for({"budget": "1GiB", "mode": "max-autotune", "epilogue_fusion": False})
    assert backend.inductor_options["max_autotune"] is True
    assert backend.inductor_options["triton.cudagraphs"] is True
    assert backend.inductor_options["epilogue_fusion"] is False
    with pytest.raises(rematch.BudgetError, match="max_autotone: options of neither"):
        _backend_for({"budget": "1GiB", "max_autotone": True})


def test_options_of_inductor_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []

    def compile_and_look(module: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        with torch._inductor.config.patch(config_patches):
            seen.append((torch._inductor.config.max_autotune, torch._inductor.config.triton.cudagraphs))
        return compile_eagerly(module, inputs, config_patches)

    use_eager_kernels(monkeypatch)
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_and_look)
    options = {"budget": "1GiB", "max_autotune": True, "triton.cudagraphs": True}
    ours = torch.compile(net(), backend=rematch_backend, options=options, dynamic=False)
    mean_square(ours(SAMPLE)).backward()
    assert seen == [(True, True)]


def test_a_loss_is_refused_in_words() -> None:
    with pytest.raises(rematch.CaptureError, match="takes no loss="):
        rematch.remat(net(), SAMPLE, budget="1GiB", engine="compiled", loss=mean_square)


def test_torch_finds_the_backend_by_name() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'entry-points.torch_dynamo_backends\]\nrematch = "(.*):(.*)"', text)
    assert found is not None
    assert getattr(import_module(found[1]), found[2]) is rematch_backend
