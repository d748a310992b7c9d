"""Schedules cut into the two graphs that inductor compiles; eager kernels run them here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import nn
from torch.fx import GraphModule

import rematch
from rematch.capture.inductor.peak import predicted_peaks
from rematch.execute.compiled import partitioner as partitioner_module
from rematch.execute.compiled.partitioner import Partitioner
from rematch.graph import Phase
from rematch.planning import planner as planner_module
from rematch.planning.compiled import Decision, GraphPlanner
from rematch.planning.planner import Planner
from rematch.planning.settings import Settings
from tests.inductor_graphs import Halves, compiled_eagerly, run_partitioned
from tests.modules import Net, batch, mean_square


def planned(budget: str) -> GraphPlanner:
    return GraphPlanner(Planner(Settings(budget=budget, time_limit=2.0, progress=False)))


def net() -> Net:
    torch.manual_seed(0)
    module = Net(depth=3)
    for block in module.blocks:  # eager kernels draw other numbers than inductor's, and never the same twice
        block.drop = nn.Identity()
    return module


def outcome(module: nn.Module, output: torch.Tensor) -> dict[str, torch.Tensor]:
    mean_square(output).backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return {**gradients, **dict(module.named_buffers()), "output": output.detach()}


@pytest.mark.parametrize("budget", ["85%", "70%"])
def test_gradients_and_buffers_are_eagers(budget: str) -> None:
    planner = planned(budget)
    module, sample = net(), batch()
    ours = outcome(module, run_partitioned(module, sample, Partitioner(planner, ())))
    assert planner.decision is not None and not planner.decision.by_torch
    assert planner.decision.plan.recomputed
    plain = net()
    theirs = outcome(plain, plain(sample))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_symbolic_shapes_are_planned_as_they_are_now_and_run_as_they_come() -> None:
    planner = planned("70%")
    module = net()
    compiled = compiled_eagerly(module, dynamic=True)
    with (
        torch._inductor.config.patch(custom_partitioner_fn=Partitioner(planner, ())),
        pytest.warns(UserWarning, match="symbolic shapes"),
    ):
        mean_square(compiled(batch())).backward()
    assert planner.decision is not None and planner.decision.plan.recomputed
    module.zero_grad()
    plain = copy.deepcopy(module)
    ours, theirs = outcome(module, compiled(batch(48))), outcome(plain, plain(batch(48)))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)


class Noting(Partitioner):
    """Keeps the halves that it returned."""

    def __call__(self, *args: Any, **known: Any) -> Halves:
        self.halves: Halves = super().__call__(*args, **known)
        return self.halves


def test_backward_gets_what_the_schedule_keeps() -> None:
    planner = planned("70%")
    partitioner = Noting(planner, ())
    run_partitioned(net(), batch(), partitioner)
    halves, decision = partitioner.halves, planner.decision
    assert decision is not None and decision.capture is not None
    kept = set(alive_at_the_loss(decision))
    placeholders = {node.name for node in halves[1].graph.find_nodes(op="placeholder")}
    made_in_forward = {node.name for node in halves[0].graph.nodes if node.op == "call_function"}
    assert placeholders & made_in_forward == kept
    again = sum(op.extra_runs for op in decision.plan.recomputed if op.name.startswith("addmm"))
    products = halves[1].graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    assert len(products) == again > 0  # backward's own products are `mm`


def alive_at_the_loss(decision: Decision) -> list[str]:
    """Names of values that the schedule still has when the loss runs, and that backward reads."""
    assert decision.capture is not None
    graph, alive = decision.capture.graph, dict[int, None]()
    read_later: set[int] = set()
    after_loss = False
    for step in decision.plan.schedule.steps.tolist():
        if step < 0:
            alive = alive if after_loss else {value: None for value in alive if value != ~step}
        elif graph.ops[step].phase is Phase.LOSS:
            after_loss = True
        elif after_loss:
            read_later |= {value for value in graph.ops[step].inputs if value in alive}
            for value in graph.ops[step].outputs:
                alive.pop(value, None)
        else:
            alive.update(dict.fromkeys(graph.ops[step].outputs))
    return [graph.values[value].name for value in read_later]


def test_plans_cost_no_more_than_torchs_own_partition_of_the_same_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    class Comparing(GraphPlanner):
        """Keeps what torch's own partition would take and recompute."""

        def decide(self, joint: GraphModule, own: Halves, cut: Any, **known: Any) -> Decision:
            decision = super().decide(joint, own, cut, **known)
            assert decision.capture is not None
            graph, (_, backward) = decision.capture.graph, own
            returned, resident = decision.capture.found.forward_outputs, graph.resident_bytes
            self.own_bytes = predicted_peaks(*own, returned=returned, resident_bytes=resident).peak_bytes(0)
            again = {node.name for node in backward.graph.nodes if node.op == "call_function"}
            self.own_seconds = sum(op.seconds for op in graph.ops if op.phase is Phase.FORWARD and op.name in again)
            return decision

    def comparing(budget: str | int, share: float) -> Comparing:
        torch._dynamo.reset()
        planner = Comparing(Planner(Settings(budget=budget, time_limit=2.0, progress=False)))
        with torch._functorch.config.patch(activation_memory_budget=share):
            run_partitioned(net(), batch(), Partitioner(planner, ()))
        return planner

    torchs = comparing("1TiB", 0.3)
    assert torchs.own_seconds > 0
    ours = comparing(torchs.own_bytes + 2**12, 1.0)
    assert ours.decision is not None and not ours.decision.by_torch
    figures = ours.decision.plan.figures
    assert figures.seconds is not None
    assert figures.seconds - figures.baseline_seconds <= torchs.own_seconds


def test_an_impossible_budget_names_the_least_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "_MINIMUM_SECONDS", 1.0)
    with pytest.raises(Exception, match="smallest that was found to work") as caught:
        run_partitioned(net(), batch(), Partitioner(planned("1KiB"), ()))
    refusal = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(refusal, rematch.BudgetInfeasible)
    assert refusal.feasible_from_bytes is not None
    planner = planned(str(refusal.feasible_from_bytes))
    torch._dynamo.reset()
    run_partitioned(net(), batch(), Partitioner(planner, ()))
    assert planner.decision is not None and planner.decision.predicted_bytes <= refusal.feasible_from_bytes


def test_a_plan_that_cannot_be_followed_leaves_torchs_partition_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> tuple[GraphModule, GraphModule]:
        raise rematch.ScheduleError("not this time")

    monkeypatch.setattr(partitioner_module, "split", fail)
    module, sample = net(), batch()
    with pytest.warns(UserWarning, match="without a budget: ScheduleError: not this time"):
        ours = outcome(module, run_partitioned(module, sample, Partitioner(planned("70%"), ())))
    plain = net()
    theirs = outcome(plain, plain(sample))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_an_error_of_our_own_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> tuple[GraphModule, GraphModule]:
        raise AttributeError("not on this version")

    monkeypatch.setattr(partitioner_module, "split", fail)
    with pytest.raises(Exception, match="not on this version"):
        run_partitioned(net(), batch(), Partitioner(planned("70%"), ()))


def test_the_gradient_of_a_tied_embedding_is_summed_without_waiting() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(64, 32)
            self.blocks = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.blocks(self.embedding(tokens)) @ self.embedding.weight.T

    tokens = torch.arange(64) % 7
    partitioner = Noting(planned("80%"), ())
    module, plain = Tied(), Tied()
    ours = outcome(module, run_partitioned(module, tokens, partitioner))
    backward = partitioner.halves[1].graph
    (difference,) = backward.find_nodes(op="call_function", target=torch.ops.aten.sub.Tensor)
    assert torch.ops.aten.mm.default in {argument.target for argument in difference.all_input_nodes}
    theirs = outcome(plain, plain(tokens))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)
