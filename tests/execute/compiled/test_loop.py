"""The closed loop: steps are measured, and graphs compiled again until their peak keeps the budget.

Eager kernels stand in for inductor's. They take more memory than fused ones, which the loop has to find out. How much
more depends on the plan, so costs are those of a data sheet: measured ones would choose another plan on another day.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from torch import nn

import rematch
from rematch.capture.inductor.lowered import LoweredStep
from rematch.capture.inductor.read import FusedCapture
from rematch.execute.compiled.backend import CompiledBackend, CompiledGraph
from rematch.execute.compiled.ledger import SharedStep
from rematch.execute.compiled.meter import StepMeter
from rematch.planning import compiled as compiled_planning, planner
from rematch.planning.compiled import Around
from rematch.planning.layouts import Layouts
from rematch.planning.planner import Planner
from rematch.planning.settings import COMPILED, Settings
from rematch.trial import Trial
from tests.inductor_graphs import use_eager_kernels
from tests.modules import mean_square

SAMPLE = torch.randn(256, 64)
_MORE_STEPS = 20  # at most, until all graphs are settled


@pytest.fixture(autouse=True)
def _eager_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[None]:
    use_eager_kernels(monkeypatch)
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path))
    yield


class Block(nn.Module):
    """Makes four times what it is given on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x)


class Stack(nn.Module):
    """Blocks, in two graphs if it `breaks`."""

    def __init__(self, depth: int, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(*(Block() for _ in range(depth // 2)))
        self.second = nn.Sequential(*(Block() for _ in range(depth // 2)))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(x)


def settled(
    module: nn.Module, budget: int, loss: Callable[[torch.Tensor], torch.Tensor] = mean_square
) -> tuple[Trial, CompiledBackend]:
    """The module under a budget, after the steps that it takes."""
    settings = Settings(budget=budget, time_limit=1.0, progress=False, engine=COMPILED, device="h100")
    backend = CompiledBackend(Planner(settings))
    trial = Trial(torch.compile(module, backend=backend, dynamic=False), loss)  # type: ignore[arg-type]
    for _ in range(5):
        trial.step(SAMPLE)
    for _ in range(_MORE_STEPS):  # a step in which nothing could be measured was no chance to correct the plan
        if all(graph._settled for graph in backend.alive()):
            break
        trial.step(SAMPLE)
    return trial, backend


def kept_bytes(module: nn.Module) -> int:
    """The peak with everything kept."""
    return settled(module, 2**40)[0].peak_bytes(SAMPLE)


def test_a_budget_is_kept_by_correcting_what_was_predicted_and_remembered() -> None:
    module = Stack(4, breaks=False)
    whole = kept_bytes(module)
    budget = int(0.9 * whole)
    torch._dynamo.reset()
    trial, backend = settled(module, budget)
    (graph,) = backend.alive()
    assert trial.peak_bytes(SAMPLE) <= budget
    assert 1 < graph.compilations <= 3
    assert graph.planner.around.correction_bytes > 0
    torch._dynamo.reset()
    _, another = settled(module, budget)  # as another process finds the notes of the first
    (again,) = another.alive()
    assert again.planner.around == graph.planner.around
    assert again.planner.decision is not None and graph.planner.decision is not None
    assert again.planner.decision.plan.schedule == graph.planner.decision.plan.schedule


def test_another_process_knows_the_schedules_that_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any budget: a refusal may have named one that only one of them keeps."""
    known = []
    module = Stack(4, breaks=False)
    whole = kept_bytes(module)
    for share in (0.9, 0.85):
        monkeypatch.setattr(compiled_planning, "_LAYOUTS", Layouts())
        torch._dynamo.reset()
        _, backend = settled(module, int(share * whole))
        (graph,) = backend.alive()
        known.append({layout.schedule: layout.beyond_bytes for layout in graph.planner.tried})
    first, second = known
    assert any(beyond_bytes is not None for beyond_bytes in first.values())
    assert first.items() <= second.items()


def test_a_graph_for_which_no_other_plan_is_found_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does another process, which starts with what was known when it was compiled."""
    compile_fx, done = torch._inductor.compile_fx.compile_fx, []

    def compile_and_note(*args: Any, **kwargs: Any) -> Any:
        run = compile_fx(*args, **kwargs)
        done.append(1)
        return run

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_and_note)
    wide = nn.Sequential(*(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64)) * 2)
    budget = int(0.95 * kept_bytes(wide))
    for _ in range(2):
        done.clear()
        torch._dynamo.reset()
        trial, backend = settled(wide, budget)
        (graph,) = backend.alive()
        assert trial.peak_bytes(SAMPLE) < 0.96 * budget
        assert done == [1]
    assert graph.planner.around == Around(unused=graph.planner.around.unused)


class Convolutions(nn.Module):
    """Images of eight pixels a side from the sample's rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [(nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for width in (1, 8, 8, 8)]
        self.layers = nn.Sequential(*(part for layer in layers for part in layer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.view(-1, 1, 8, 8))


def attention() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(0, (8, 32)), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stack(4, breaks=False),
        pytest.param(Convolutions, marks=pytest.mark.slow),
        pytest.param(attention, marks=pytest.mark.slow),
    ],
)
def test_a_smaller_budget_never_gives_a_larger_peak(make: Callable[[], nn.Module]) -> None:
    whole = kept_bytes(make())
    peaks = [whole]
    for share in (0.92, 0.84):
        torch._dynamo.reset()
        peaks.append(settled(make(), int(share * whole))[0].peak_bytes(SAMPLE))
        assert peaks[-1] <= share * whole
    assert peaks == sorted(peaks, reverse=True)


def long_loss(output: torch.Tensor) -> torch.Tensor:
    """Keeps several tensors of the output's size for its own backward."""
    return torch.cat([output.exp().sin().square(), output.tanh().cos().square()], 1).mean()


def test_what_the_loss_takes_is_part_of_the_peak() -> None:
    module = nn.Sequential(Stack(4, breaks=False), nn.Linear(64, 256))
    trial, _ = settled(module, 2**40, long_loss)
    whole = trial.peak_bytes(SAMPLE)
    torch._dynamo.reset()
    trial, backend = settled(module, int(0.9 * whole), long_loss)
    (graph,) = backend.alive()
    assert graph.planner.around.between_bytes
    assert graph.planner.around.between_bytes > 4 * 256 * 256 * 4
    assert trial.peak_bytes(SAMPLE) <= 0.9 * whole


def test_the_budget_that_a_refusal_names_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest plan exceeds its prediction by more than others do, so it is measured before it is named."""
    monkeypatch.setattr(compiled_planning, "_LAYOUTS", Layouts())
    judge = CompiledGraph._judge

    def judge_the_smallest_larger(graph: CompiledGraph, meter: StepMeter) -> None:
        assert meter.peak_bytes is not None and graph.planner.decision is not None
        meter.peak_bytes += 20_000 * len(graph.planner.decision.plan.recomputed)
        judge(graph, meter)

    monkeypatch.setattr(CompiledGraph, "_judge", judge_the_smallest_larger)
    whole = kept_bytes(Stack(4, breaks=False))
    torch._dynamo.reset()
    with pytest.raises(rematch.BudgetInfeasible) as refusal:
        settled(Stack(4, breaks=False), int(0.58 * whole))
    least = refusal.value.feasible_from_bytes
    assert least is not None and 0.58 * whole < least < whole
    torch._dynamo.reset()
    _, backend = settled(Stack(4, breaks=False), least)
    (graph,) = backend.alive()
    assert graph._settled and graph.compilations <= 3


class EagerAfter(nn.Module):
    """A graph, and then a layer in eager mode."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph, self.after = graph, nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run_eagerly(self.after, self.graph(x))


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def run_eagerly(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x).sin()  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [nn.Sequential, EagerAfter])
def test_the_measured_peak_is_that_of_steps_that_are_not_measured(
    make: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where backward lets go of its tangents before its own peak."""
    judge, measured = CompiledGraph._judge, []

    def noting(graph: CompiledGraph, meter: StepMeter) -> None:
        measured.append((meter.peak_bytes, meter.tangent_bytes))
        judge(graph, meter)

    monkeypatch.setattr(CompiledGraph, "_judge", noting)
    wide = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 64))
    trial, _ = settled(make(wide), 2**40)
    ((peak_bytes, tangent_bytes),) = measured
    assert tangent_bytes == SAMPLE.nbytes
    assert peak_bytes == pytest.approx(trial.peak_bytes(SAMPLE), abs=64)


class EagerBetween(Stack):
    """Two graphs, between which eager mode runs a layer with parameters of its own."""

    def __init__(self) -> None:
        super().__init__(6, breaks=False)
        self.between = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(run_eagerly(self.between, self.first(x)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, of a graph after a break
def test_what_runs_in_eager_mode_between_graphs_is_part_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, measured = CompiledGraph._judge_together, []

    def noting(graph: CompiledGraph, step: SharedStep) -> None:
        measured.append(step.peak_bytes)
        judge(graph, step)

    monkeypatch.setattr(CompiledGraph, "_judge_together", noting)
    whole = kept_bytes(EagerBetween())
    torch._dynamo.reset()
    budget = int(0.85 * whole)
    trial, backend = settled(EagerBetween(), budget)
    assert len(list(backend.alive())) == 2
    peak_bytes = trial.peak_bytes(SAMPLE)
    assert peak_bytes <= budget
    assert measured[0] == pytest.approx(whole, abs=64)
    assert measured[-1] == pytest.approx(peak_bytes, abs=64)
    torch._dynamo.reset()
    with pytest.raises(rematch.BudgetInfeasible, match="by the 2 graphs that a step runs through"):
        settled(EagerBetween(), whole // 3)[0].step(SAMPLE)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, of a graph after a break
def test_graphs_of_one_model_share_the_budget() -> None:
    whole = kept_bytes(Stack(6, breaks=True))
    torch._dynamo.reset()
    trial, backend = settled(Stack(6, breaks=True), int(0.8 * whole))
    assert len(list(backend.alive())) == 2
    assert trial.peak_bytes(SAMPLE) <= 0.8 * whole
    assert any(plan.recomputed for plan in backend.planner.plans)


def test_a_budget_that_measuring_finds_impossible_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_MINIMUM_SECONDS", 1.0)
    module = Stack(4, breaks=False)
    with pytest.raises(rematch.BudgetInfeasible) as refusal:
        settled(module, 2**10)
    least = refusal.value.feasible_from_bytes
    assert least is not None
    torch._dynamo.reset()
    with pytest.raises(rematch.BudgetInfeasible, match="measured to") as refusal:
        settled(module, least)
    measured = refusal.value.feasible_from_bytes
    assert measured is not None
    torch._dynamo.reset()
    assert settled(module, measured)[0].peak_bytes(SAMPLE) <= measured


def test_where_no_compilation_keeps_the_budget_the_closest_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Stack(4, breaks=False)
    budget = int(0.9 * kept_bytes(module))
    measured = iter((1.01, 1.005, 1.015))  # of the budget, as if inductor undid what a plan gains
    judge = CompiledGraph._judge
    seen: list[Around] = []

    def judge_otherwise(graph: CompiledGraph, meter: StepMeter) -> None:
        meter.peak_bytes = int(next(measured) * budget)
        seen.append(graph.planner.around)
        judge(graph, meter)

    monkeypatch.setattr(CompiledGraph, "_judge", judge_otherwise)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="Name a smaller budget"):
        _, backend = settled(module, budget)
    (graph,) = backend.alive()
    assert len(seen) == 3
    assert graph.planner.around == seen[1]


def planned_with() -> set[int]:
    """The captures and layouts there are."""
    gc.collect()
    return {id(each) for each in gc.get_objects() if type(each) in (FusedCapture, LoweredStep)}


def test_once_settled_nothing_is_kept_of_what_was_planned_but_the_plan() -> None:
    """Traced graphs and inductor's layouts of a large model are millions of objects, which collections go through."""
    before = planned_with()
    trial, backend = settled(Stack(4, breaks=False), 3_500_000)
    assert backend.planner.plans and planned_with() <= before
    trial.step(SAMPLE)
