"""The verbs: `plan` changes nothing, `apply` takes only its own graph, `remat` refuses in words what it cannot do."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rematch
from rematch.api import as_arguments
from rematch.errors import (
    BudgetError,
    BudgetInfeasible,
    CaptureError,
    DeviceError,
    RematchError,
    ScheduleError,
    SolverError,
)
from rematch.graph import Phase
from rematch.graph.blocks import repeated_blocks
from rematch.planning.plan import Plan
from rematch.units import format_bytes
from tests.modules import Net, batch, mean_square
from tests.training import assert_trains_alike, noted, same_bits

REMAT: dict[str, Any] = {"budget": "75%", "time_limit": 0.5}


@pytest.fixture(autouse=True)
def fixed_parameters() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def known_plan() -> Plan:
    """Of `Net` on `batch()`, for tests that only read or use it."""
    return rematch.plan(Net(), batch(), **REMAT)


class Noticing(Net):
    """Its forward leaves traces: an attribute, a buffer's contents, a buffer of another tensor, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        self.seen += x.sum()
        self.last = x.mean()
        return super().forward(x, scale)


@contextmanager
def nothing_changed(module: nn.Module, *inputs: torch.Tensor) -> Iterator[None]:
    """What the block finds of the module, the inputs and the random state is there afterwards."""

    def attributes() -> list[dict[str, int]]:
        owned = [own for part in parts for own in (part.__dict__, part._parameters, part._buffers, part._modules)]
        return [{name: id(value) for name, value in own.items()} for own in owned]

    parts = list(module.modules())
    gradients = [parameter.grad for parameter in module.parameters()]
    tensors = [*module.parameters(), *module.buffers(), *inputs, *(g for g in gradients if g is not None)]
    before, contents, versions = attributes(), [noted(t) for t in tensors], [t._version for t in tensors]
    random, engine = torch.get_rng_state(), torch.autograd._engine_run_backward
    yield
    assert list(module.modules()) == parts
    assert attributes() == before
    assert [id(parameter.grad) for parameter in module.parameters()] == [id(gradient) for gradient in gradients]
    assert [t._version for t in tensors] == versions
    assert all(same_bits(*pair) for pair in zip(tensors, contents, strict=True))
    assert same_bits(torch.get_rng_state(), random)
    assert torch.autograd._engine_run_backward is engine
    assert not torch.autograd._profiler_enabled()


# plan


@pytest.mark.parametrize("loss", [None, mean_square], ids=["unknown", "given"])
@pytest.mark.parametrize("verb", [rematch.plan, rematch.remat])
def test_planning_changes_nothing(verb: Callable[..., Any], loss: Any) -> None:
    module, x = Noticing(), batch()
    mean_square(module(x)).backward()
    with nothing_changed(module, x):
        verb(module, x, loss=loss, **REMAT)


def test_a_plan_tells_what_the_peak_is_made_of(known_plan: Plan) -> None:
    parts = {part.role: part.size_bytes for part in known_plan.parts}
    assert sum(parts.values()) == known_plan.figures.peak_bytes
    assert parts["parameters"] == sum(parameter.nbytes for parameter in Net().parameters())
    assert parts["inputs"] == batch().nbytes
    shown = str(known_plan)
    assert f"parameters {format_bytes(parts['parameters'])}" in shown
    assert "activations" in shown


def test_a_plan_is_saved_with_its_parts_and_notes(tmp_path: Path) -> None:
    plan = rematch.plan(Net(), batch(), device="h100", **REMAT)
    plan.save(tmp_path / "plan.json")
    assert plan.parts and plan.notes
    assert Plan.load(tmp_path / "plan.json") == plan


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.projection(x).unflatten(-1, (3, 4, 8)).transpose(1, 3).unbind(2)
        return nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def test_plans_for_a_device_that_is_not_here() -> None:
    plan = rematch.plan(FusedAttention(), torch.randn(4, 64, 32), budget="100%", time_limit=0.5, device="h100")
    assert plan.notes[0] == "costs are estimated for H100, not measured"
    mapped = next(note for note in plan.notes if "attention" in note)
    assert "_scaled_dot_product_flash_attention_for_cpu" in mapped
    assert f"note    {plan.notes[0]}" in str(plan)


def test_another_device_has_another_speed() -> None:
    slow, fast = (rematch.plan(Net(), batch(), device=device, **REMAT) for device in ("p100", "h200"))
    assert slow.figures.baseline_seconds > fast.figures.baseline_seconds
    assert slow.graph_fingerprint == fast.graph_fingerprint


# apply


def test_a_plan_from_a_file_is_used(known_plan: Plan, tmp_path: Path) -> None:
    known_plan.save(tmp_path / "plan.json")
    plain = Net()
    module = rematch.apply(copy.deepcopy(plain), tmp_path / "plan.json", batch())
    assert rematch.plans_of(module) == (known_plan,)
    assert_trains_alike(module, plain, batch(), mean_square)  # the loss, once measured, may ask for another plan


def test_a_plan_that_knows_its_loss_is_used_with_it() -> None:
    """The loss is part of the graph: without it, or with another, the plan is for something else."""
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 512))
    plan = rematch.plan(plain, batch(), budget="95%", loss=torch.sum, time_limit=0.5)
    module = rematch.apply(copy.deepcopy(plain), plan, batch(), loss=torch.sum)
    for one in (module, plain):
        one(batch()).sum().backward()
    assert all(same_bits(p.grad, q.grad) for p, q in zip(module.parameters(), plain.parameters(), strict=True))
    assert rematch.plans_of(module) == (plan,)
    with pytest.raises(ScheduleError, match="made for another graph"):
        rematch.apply(plain, plan, batch())
    with pytest.raises(ScheduleError, match="made for another graph"):
        rematch.apply(plain, plan, batch(), loss=mean_square)


@pytest.mark.parametrize("ahead", [True, False], ids=["with_sample", "in_the_first_step"])
def test_a_plan_for_another_graph_is_refused(known_plan: Plan, ahead: bool) -> None:
    other, x = Net(depth=4), batch()
    with nothing_changed(other, x), pytest.raises(ScheduleError, match=r"made for another graph.*had \d+ operators"):
        module = rematch.apply(other, known_plan, x if ahead else None)
        module(x)
    with pytest.raises(ScheduleError, match="differ in names, sizes"):
        rematch.apply(Net(), known_plan, batch(8))


# remat


@pytest.mark.parametrize("loss", [None, mean_square], ids=["unknown", "given"])
def test_without_a_sample_the_first_training_call_plans(loss: Any) -> None:
    plain = Net()
    module = rematch.remat(copy.deepcopy(plain), loss=loss, **REMAT)
    with torch.no_grad():
        module.eval()(batch())
    assert rematch.plans_of(module.train()) == ()
    assert_trains_alike(module, plain, batch(), mean_square)
    assert any(plan.recomputed for plan in rematch.plans_of(module))


def test_in_place_the_module_itself_trains_inside_the_budget(known_plan: Plan) -> None:
    plain = Net()
    module = copy.deepcopy(plain)
    budget = known_plan.figures.budget_bytes
    assert rematch.remat(module, batch(), budget=budget, loss=mean_square, in_place=True) is module
    first = rematch.plans_of(module)
    assert first[0].recomputed
    with pytest.raises(BudgetInfeasible):
        rematch.remat(module, batch(), budget=1000, loss=mean_square, in_place=True)
    assert rematch.plans_of(module) == first, "a budget that is refused leaves the module as it was"
    assert_trains_alike(module, plain, batch(), mean_square)


def test_budgets_in_all_forms(known_plan: Plan) -> None:
    whole_bytes = known_plan.figures.baseline_peak_bytes
    for budget, budget_bytes in {
        400_000: 400_000,
        "400KB": 400_000,
        "0.5MiB": 2**19,
        "80%": whole_bytes * 80 // 100,
    }.items():
        plan = rematch.plan(Net(), batch(), budget=budget, time_limit=0.5)
        assert budget_bytes - 1024 <= plan.figures.budget_bytes <= budget_bytes + 1024, "some bytes are for scalars"
        assert plan.figures.peak_bytes <= budget_bytes


def test_the_automatic_budget_is_what_is_free(known_plan: Plan) -> None:
    plan = rematch.plan(Net(), batch(), budget="auto", time_limit=0.5)
    assert plan.figures.budget_bytes > 2**20
    assert plan.figures.overhead_pct == 0.0
    on_device = rematch.plan(Net(), batch(), budget="auto", device="v100-16gb", time_limit=0.5)
    assert 14 * 10**9 < on_device.figures.budget_bytes < 17 * 2**30


def test_bytes_kept_in_reserve_are_not_used(known_plan: Plan) -> None:
    reserved = rematch.plan(Net(), batch(), reserve="40KiB", **{**REMAT, "budget": known_plan.figures.budget_bytes})
    parts = {part.role: part.size_bytes for part in reserved.parts}
    assert parts["already allocated"] == 40 * 2**10
    assert reserved.figures.overhead_pct > known_plan.figures.overhead_pct


def test_a_refused_module_is_not_kept_alive() -> None:
    """Dynamo keeps backends that failed; ours must not hold the user's parameters."""

    def refused() -> weakref.ref[nn.Parameter]:
        model = Net()
        with pytest.raises(BudgetInfeasible):
            rematch.remat(model, batch(), budget=1000)
        return weakref.ref(next(model.parameters()))

    parameter = refused()
    torch._dynamo.reset()
    gc.collect()
    assert parameter() is None


def test_an_infeasible_budget_names_one_that_works() -> None:
    module, x = Net(depth=2), batch()
    with nothing_changed(module, x), pytest.raises(BudgetInfeasible, match=r"alone holds|Alive at the end") as caught:
        rematch.remat(module, x, budget="10%", time_limit=0.5)
    smallest = caught.value.feasible_from_bytes
    assert f"Try budget={smallest}" in str(caught.value)
    plain = copy.deepcopy(module)
    tightest = rematch.remat(module, x, budget=smallest, time_limit=0.5)
    assert rematch.plans_of(tightest)[0].figures.peak_bytes <= smallest
    assert_trains_alike(tightest, plain, x, mean_square)


# Code of the user's own


class Printing(Net):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        print("in forward")
        return super().forward(x, scale)


class Branching(Net):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if x.sum() > 0:
            x = -x
        return super().forward(x, scale)


@pytest.mark.parametrize("kind", [Printing, Branching])
def test_any_python_may_run_in_forward(kind: type[Net], capsys: pytest.CaptureFixture[str]) -> None:
    plain = kind()
    module = rematch.remat(copy.deepcopy(plain), batch(), **REMAT)
    assert_trains_alike(module, plain, batch(), mean_square)
    assert_trains_alike(module, plain, -batch(), mean_square)
    assert any(plan.recomputed for plan in rematch.plans_of(module))


def test_what_replay_cannot_trace_is_named_with_its_line() -> None:
    module, x = Branching(), batch()
    with nothing_changed(module, x), pytest.raises(CaptureError, match=r"Ways around it") as caught:
        rematch.remat(module, x, engine="replay", **REMAT)
    line = "if x.sum() > 0:"
    assert f'test_api.py:{_number_of(line)}, in forward: "{line}"' in str(caught.value)


def _number_of(line: str) -> int:
    """Where the first line that reads like this is in this file."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.strip() == line)


class Mine(Exception):
    """Of the user's own making."""


class Raising(Net):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = super().forward(x, scale)
        raise self.error


@pytest.mark.parametrize(
    "error", [KeyError("weight"), ValueError("not today"), Mine(3)], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("ahead", [True, False], ids=["with_sample", "at_first_call"])
def test_an_error_of_the_users_own_passes_through(error: Exception, ahead: bool) -> None:
    module, x = Raising(error), batch()
    with nothing_changed(module, x), pytest.raises(type(error)) as caught:
        rematch.remat(module, x if ahead else None, **REMAT)(x)
    assert caught.value is error


class RaisingLater(Net):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if x[0, 0] > 100:
            raise Mine("in mid-training")
        return super().forward(x, scale)


def test_an_error_in_training_passes_through_and_training_goes_on() -> None:
    plain = RaisingLater()
    module = rematch.remat(copy.deepcopy(plain), batch(), **REMAT)
    for _ in range(2):
        with pytest.raises(Mine, match="in mid-training"):
            module(batch() + 1000)
        assert_trains_alike(module, plain, batch(), mean_square)


@pytest.mark.parametrize("sample", [torch.ones(4, 5), "text", batch().double()], ids=["shape", "text", "dtype"])
def test_a_sample_that_the_module_cannot_take_fails_as_it_does_plainly(sample: Any) -> None:
    module = Net().eval()
    with pytest.raises(Exception) as plainly:
        module(sample)
    with nothing_changed(module), pytest.raises(type(plainly.value)) as caught:
        rematch.remat(module, sample, **{**REMAT, "budget": "100%"})(sample)
    assert str(caught.value) == str(plainly.value)


# Refusals


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"solver": "gready"}, SolverError, "unknown solver 'gready'; did you mean 'greedy'"),
        ({"nonsense": 3}, SolverError, "has no option 'nonsense'"),
        ({"budget": "80 apples"}, BudgetError, "unknown unit 'apples'"),
        ({"budget": -1}, BudgetError, "less than one byte"),
        ({"reserve": "a lot"}, BudgetError, "'a lot' cannot be read"),
        ({"loss": lambda output: output}, CaptureError, r"one differentiable number.*shape \(128, 4\)"),
        ({"loss": lambda output: output.sum().item()}, CaptureError, "one differentiable number.*float"),
        ({"sample": ()}, CaptureError, r"does not fit Net\.forward.*missing a required argument: 'x'"),
        ({"sample": (batch(), 1.0, 2)}, CaptureError, "does not fit.*too many positional arguments"),
        ({"sample": {"x": batch(), "z": 1}}, CaptureError, "does not fit.*unexpected keyword argument 'z'"),
        ({"sample": {3: batch()}}, CaptureError, "a dict as sample holds keyword arguments"),
        ({"engine": "tapes"}, RematchError, "unknown engine 'tapes'; did you mean 'tape'"),
    ],
)
def test_bad_arguments_change_nothing(change: dict[str, Any], error: type[Exception], said: str) -> None:
    module = Net()
    with nothing_changed(module), pytest.raises(error, match=said):
        rematch.remat(module, **{"sample": batch(), **REMAT, **change})


def test_only_modules_are_taken() -> None:
    with pytest.raises(CaptureError, match=r"takes a torch\.nn\.Module, not builtin_function_or_method"):
        rematch.remat(torch.relu, batch(), **REMAT)
    with pytest.raises(CaptureError, match="Net was not made by"):
        rematch.plans_of(Net())
    with pytest.raises(CaptureError, match="rematch needs a sample"):
        rematch.plan(Net(), None, **REMAT)
    with pytest.raises(DeviceError, match="unknown device 'h1000'; did you mean 'h100'"):
        rematch.plan(Net(), batch(), device="h1000", **REMAT)


class Adding(nn.Module):
    def forward(self, number: int) -> int:
        return number + 1


@pytest.mark.parametrize(
    ("module", "sample"), [(Adding(), 3), (Net().eval().requires_grad_(False), batch())], ids=["numbers", "frozen"]
)
def test_where_nothing_needs_gradients_nothing_is_planned(module: nn.Module, sample: Any) -> None:
    wrapped = rematch.remat(module, sample, **REMAT)
    assert torch.equal(torch.as_tensor(wrapped(sample)), torch.as_tensor(module(sample)))
    assert rematch.plans_of(wrapped) == ()
    with pytest.raises(CaptureError, match=f"nothing that {type(module).__name__} returns .* needs gradients"):
        rematch.plan(module, sample, **REMAT)


def test_samples_as_calls() -> None:
    x = batch()
    assert as_arguments(x) == ((x,), {})
    assert as_arguments((x, 1)) == ((x, 1), {})
    assert as_arguments({"x": x}) == ((), {"x": x})
    assert as_arguments(((x,), {"scale": 2})) == ((x,), {"scale": 2})
    assert as_arguments([x]) == (([x],), {})


def test_traces_a_module_to_a_graph_that_can_be_kept(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    graph = rematch.trace(model, torch.randn(32, 8))
    assert [op.phase for op in graph.ops if op.phase is Phase.LOSS] == [Phase.LOSS]
    assert {"0.0.weight", "3.0.bias"} <= {value.name for value in graph.values if value.role == "parameters"}
    assert ("1", "2") in {block.paths for block in repeated_blocks(graph)}, (
        "the first reads the input, the last is held"
    )
    rematch.graph.save_graph(graph, tmp_path / "graph.json")
    assert rematch.graph.load_graph(tmp_path / "graph.json").graph == graph
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert "forward" not in model.__dict__
