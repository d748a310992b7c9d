"""Training through inductor inside a budget, with its C++ backend: what is promised to who trains by torch.compile."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
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
from rematch.execute.compiled import backend as backend_module
from rematch.execute.compiled.backend import _backend_for, rematch_backend
from rematch.planning import compiled as compiled_planning, planner
from rematch.trial import Trial, same_outcome
from tests.inductor_graphs import compile_eagerly, use_eager_kernels
from tests.modules import Net, batch, mean_square

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="inductor's CPU backend needs a C++ compiler: install g++",
)
SAMPLE = batch(512)
ROOT = Path(__file__).parents[3]


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


@needs_compiler
@pytest.mark.slow
def test_a_smaller_budget_never_gives_a_larger_peak() -> None:
    whole = trained(torch.compile(net(), dynamic=False)).peak_bytes(SAMPLE)  # type: ignore[arg-type]
    peaks = [whole]
    for share in (0.9, 0.8, 0.7):
        torch._dynamo.reset()
        budget = int(share * whole)
        peaks.append(trained(rematch.remat(net(), budget=budget, engine="compiled", time_limit=2.0)).peak_bytes(SAMPLE))
        assert peaks[-1] <= budget
    assert peaks == sorted(peaks, reverse=True)


_START = """
import sys, torch, rematch
from torch._dynamo.utils import counters
from rematch.planning import planner
from rematch.trial import Trial
from tests.modules import Net, batch, mean_square

solved = []
solve = planner.solve
planner.solve = lambda *args, **options: solved.append(1) or solve(*args, **options)
torch.manual_seed(0)
model = torch.compile(Net(depth=2), backend="rematch", options={"budget": int(sys.argv[1]), "time_limit": 2.0})
trial = Trial(model, mean_square)
for _ in range(4):
    trial.step(batch(512))
hits = counters["aot_autograd"]["autograd_cache_hit"]
print(len(solved), hits, counters["aot_autograd"]["autograd_cache_miss"], trial.peak_bytes(batch(512)))
"""


@needs_compiler
@pytest.mark.slow
def test_another_process_finds_what_was_compiled_for_its_budget_and_no_other(tmp_path: Path) -> None:
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "REMATCH_CACHE": str(tmp_path / "rematch")}

    def start(budget: int) -> list[int]:
        command = [sys.executable, "-W", "ignore", "-c", _START, str(budget)]
        done = subprocess.run(
            command, env={**os.environ, **caches}, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
        )
        return [int(word) for word in done.stdout.split()]

    *_, whole = start(2**40)
    budgets = int(0.85 * whole), int(0.75 * whole)
    firsts = [start(budget) for budget in budgets]
    for budget, first in zip(budgets, firsts, strict=True):
        assert first[0] > 0 and first[2] > 0, "solved and compiled"
        solved, hits, misses, peak = start(budget)
        assert (solved, misses) == (0, 0) and hits > 0
        assert peak == first[3] <= budget


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "needs a budget"),
        ({"mode": "max-autotune"}, "takes no mode; give options instead"),
        ({"options": {"budget": "1GiB", "max_autotone": True}}, "max_autotone: options of neither"),
        ({"options": {"budget": "1GiB", "mode": "fastest"}}, "mode: Unrecognized mode=fastest, should be one of"),
        ({"options": {"budget": "8 apples"}}, "unknown unit 'apples'"),
    ],
)
def test_options_that_cannot_be_read_are_refused_in_our_own_words(given: dict[str, Any], said: str) -> None:
    with pytest.raises(rematch.BudgetError, match=said):
        torch.compile(net(), backend=rematch_backend, **given)(SAMPLE)


def test_a_mode_of_inductor_goes_into_the_options() -> None:
    backend = _backend_for({"budget": "1GiB", "mode": "max-autotune", "epilogue_fusion": False})
    assert backend.inductor_options["max_autotune"] is True
    assert backend.inductor_options["triton.cudagraphs"] is True
    assert backend.inductor_options["epilogue_fusion"] is False
    assert _backend_for({"budget": "1GiB", "mode": "reduce-overhead"}).inductor_options == {"triton.cudagraphs": True}


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


@pytest.mark.parametrize(
    ("options", "asked_for"),
    [({}, True), ({"triton.cudagraphs": True}, False), ({"mode": "max-autotune"}, False)],
)
def test_cuda_graphs_leave_the_allocator_as_it_is(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], asked_for: bool
) -> None:
    asked: list[torch.device] = []
    use_eager_kernels(monkeypatch)
    monkeypatch.setattr(backend_module, "use_expandable_segments", asked.append)
    first = torch.compile(net(), backend=rematch_backend, options={"budget": "1GiB", **options}, dynamic=False)
    first(SAMPLE)
    assert bool(asked) is asked_for
    asked.clear()
    torch._dynamo.reset()
    with torch._inductor.config.patch({"triton.cudagraphs": True}):  # as TORCHINDUCTOR_CUDAGRAPHS does
        first(SAMPLE)
    assert not asked


def patches_of(monkeypatch: pytest.MonkeyPatch, budget: str | int, **options: Any) -> list[dict[str, Any]]:
    """What inductor is asked to compile the graphs of a model with."""
    seen: list[dict[str, Any]] = []

    def compile_and_look(module: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        seen.append(config_patches)
        return compile_eagerly(module, inputs, config_patches)

    torch._dynamo.reset()
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_and_look)
    torch.compile(net(), backend=rematch_backend, options={"budget": budget, **options}, dynamic=False)(SAMPLE)
    return seen


def test_settings_of_inductor_are_ours_unless_the_user_has_given_them(monkeypatch: pytest.MonkeyPatch) -> None:
    use_eager_kernels(monkeypatch)
    reuse, order = "allow_buffer_reuse", "_post_fusion_custom_pass"
    (ours,) = patches_of(monkeypatch, "1GiB", max_autotune=True)
    assert ours["max_autotune"] is True and ours[reuse] is False and ours[order] is not None
    (given,) = patches_of(monkeypatch, "1GiB", **{reuse: True, order: None})
    assert given[reuse] is True and given[order] is None
    assert {reuse, order} <= set(torch._inductor.list_options())


def uuids_of(monkeypatch: pytest.MonkeyPatch, budget: str | int, **options: Any) -> list[Any]:
    """What inductor's caches tell the partitions of a model by."""
    return [patches["custom_partitioner_fn"].uuid() for patches in patches_of(monkeypatch, budget, **options)]


def test_caches_tell_partitions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    use_eager_kernels(monkeypatch)
    (first,) = uuids_of(monkeypatch, "1GiB")
    assert uuids_of(monkeypatch, "1GiB") == [first]
    assert backend_module.__version__ in first and "cpu" in first
    others = [
        uuids_of(monkeypatch, "2GiB"),
        uuids_of(monkeypatch, "1GiB", max_autotune=True),
        uuids_of(monkeypatch, "1GiB", solver="greedy"),
        uuids_of(monkeypatch, "1GiB", reserve="1MiB"),
    ]
    monkeypatch.setattr(compiled_planning, "available_bytes", lambda *_: 2**34)
    others.append(uuids_of(monkeypatch, "auto"))
    monkeypatch.setattr(compiled_planning, "available_bytes", lambda *_: 2**33)  # another program takes the rest
    others.append(uuids_of(monkeypatch, "auto"))
    monkeypatch.setattr(backend_module, "__version__", "another")
    others.append(uuids_of(monkeypatch, "1GiB"))
    monkeypatch.setattr(backend_module, "_device_name", lambda _: "another")
    others.append(uuids_of(monkeypatch, "1GiB"))
    assert len({repr(found) for found in [[first], *others]}) == 1 + len(others)


def test_a_saved_plan_is_applied_without_solving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_eager_kernels(monkeypatch)
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path / "one"))
    made = rematch.plan(net(), SAMPLE, budget="80%", engine="compiled", time_limit=1.0)
    assert made.recomputed
    made.save(tmp_path / "plan.json")

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("solved again")

    torch._dynamo.reset()
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path / "another"))  # of another machine
    monkeypatch.setattr(planner, "solve", fail)
    applied = rematch.apply(net(), tmp_path / "plan.json", SAMPLE)
    (plan,) = rematch.plans_of(applied)
    assert plan.schedule == made.schedule and plan.engine == "compiled"
    mean_square(applied(SAMPLE)).backward()


def test_sizes_that_are_known_only_in_a_step_are_named_and_run_as_torch_cuts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x))[x[:, 0].nonzero().squeeze(1)])

    use_eager_kernels(monkeypatch)
    module, plain = Picking(), Picking()
    plain.load_state_dict(module.state_dict())
    ours = torch.compile(module, backend=rematch_backend, options={"budget": "1GiB"})
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.warns(UserWarning, match="known only while the graph runs"),
    ):
        mean_square(ours(SAMPLE)).backward()
    mean_square(plain(SAMPLE)).backward()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_graph_with_sparse_gradients_runs_as_torch_cuts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def looking_up() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(64, 32, sparse=True), nn.Linear(32, 32), nn.Tanh())

    use_eager_kernels(monkeypatch)
    module, plain, tokens = looking_up(), looking_up(), torch.arange(128) % 7
    ours = torch.compile(module, backend=rematch_backend, options={"budget": "64KiB"})
    with pytest.warns(UserWarning, match="sparse tensor"):
        mean_square(ours(tokens)).backward()
    mean_square(plain(tokens)).backward()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.to_dense(), theirs.grad.to_dense(), rtol=1e-4, atol=1e-6)


def test_a_module_that_torch_leaves_to_eager_mode_is_refused_in_words() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cells(x)[0]

    with pytest.raises(rematch.CaptureError, match=r"as it does with nn\.LSTM"):
        rematch.remat(Recurrent(), SAMPLE, budget="1GiB", engine="compiled")


def test_a_loss_is_refused_in_words() -> None:
    with pytest.raises(rematch.CaptureError, match="takes no loss="):
        rematch.remat(net(), SAMPLE, budget="1GiB", engine="compiled", loss=mean_square)


def test_torch_finds_the_backend_by_name() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'entry-points.torch_dynamo_backends\]\nrematch = "(.*):(.*)"', text)
    assert found is not None
    assert getattr(import_module(found[1]), found[2]) is rematch_backend
