"""The graph of a recording: eager's peak to the byte, and what may run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models import TINY
from rematch.capture.recorded_graph import RecordedGraph, recorded_graph
from rematch.graph import Op, Phase, baseline, simulate
from tests.captures import Computed, recording_of
from tests.modules import Net, batch, mean_square
from tests.training import measured_peak

CPU = torch.device("cpu")
_SCALARS = 64  # bytes that autograd and kernels take for single numbers, which no dispatcher sees
X = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def fixed_parameters() -> None:
    torch.manual_seed(0)


def graph_of(module: nn.Module, sample: Any, loss: Any = None, **options: Any) -> RecordedGraph:
    return recorded_graph(recording_of(module, sample, loss, **options), name="tested")


def op_of(recorded: RecordedGraph, part: str) -> Op:
    """The one operator of forward that has this in its name, and is not about its random state."""
    named = [op for op in recorded.graph.ops if part in op.name and not op.name.endswith(".state")]
    (found,) = [op for op in named if op.phase is Phase.FORWARD]
    return found


def eager_peak(module: nn.Module, sample: Any, loss: Callable[[Any], torch.Tensor]) -> int:
    """Of a step whose outputs are not held, beyond what is there before."""
    args, kwargs = sample

    def step() -> None:
        loss(module(*args, **kwargs)).backward()

    step()  # the first step may load libraries and fill caches
    module.zero_grad()
    peak_bytes, _ = measured_peak(CPU, step)
    return peak_bytes


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet_basic", "transformer", "regnet", "mobilenet"])
def test_the_peak_of_eager_is_predicted_to_the_byte(name: str) -> None:
    case = TINY[name]
    module, sample = case.build(), case.sample()
    graph = graph_of(module, sample, case.loss).graph
    predicted_bytes = simulate(graph, baseline(graph)).peak_bytes - graph.resident_bytes
    missing_bytes = eager_peak(module, sample, case.loss) - predicted_bytes
    assert 0 <= missing_bytes <= _SCALARS


def test_residents_have_names_and_roles() -> None:
    module = Net()
    mean_square(module(batch())).backward()
    graph = graph_of(module, batch()).graph
    by_role = {
        role: {value.name for value in graph.values if value.resident and value.role == role}
        for role in ("parameters", "buffers", "inputs", "gradients")
    }
    assert by_role["parameters"] == {name for name, _ in module.named_parameters()}
    assert by_role["buffers"] <= {name for name, _ in module.named_buffers()}
    assert by_role["gradients"] == {f"{name}.grad" for name, _ in module.named_parameters()}
    assert len(by_role["inputs"]) == 1
    assert graph.recompute_after_loss


def test_gradients_that_are_expected_are_there_from_the_start() -> None:
    plain, adding = (graph_of(Net(), batch(), accumulate=accumulate).graph for accumulate in (False, True))
    whole_bytes = sum(parameter.nbytes for parameter in Net().parameters())
    assert adding.resident_bytes == plain.resident_bytes + whole_bytes
    assert not [value for value in plain.values if value.resident and value.role == "gradients"]


def test_tensors_that_share_memory_count_once() -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    module[1].weight = module[0].weight
    graph = graph_of(module, X).graph
    assert sum(v.size_bytes for v in graph.values if v.role == "parameters") == 5 * 5 * 4 + 2 * 5 * 4


# Written in place


def test_a_write_that_follows_at_once_is_part_of_the_operator_before() -> None:
    recorded = graph_of(Computed(lambda y: y.relu_().sin().exp()), X)
    joined = op_of(recorded, "relu_")
    assert joined.name.startswith("addmm+relu_")
    assert not joined.once
    place = next(place for place, op in enumerate(recorded.graph.ops) if op is joined)
    assert len(recorded.calls[place]) == 2


def _rows_of(y: torch.Tensor, share: int) -> torch.Tensor:
    """The first of `share` parts of the rows twice over, each computed after the memory that it is written into."""
    rows, count = torch.zeros_like(y), len(y) // share
    for half in (slice(0, count // 2), slice(count // 2, count)):
        rows[half] = y[half].tanh()
    return rows


def test_writes_of_what_is_made_later_are_one_operator_where_the_last_of_them_is() -> None:
    recorded = graph_of(Computed(lambda y: (_rows_of(y, 4).exp() * y).sin()), X)
    graph = recorded.graph
    joined = op_of(recorded, "copy_")
    assert joined.name.startswith("zeros_like+copy_+copy_") and not joined.once
    made = [number for number, op in enumerate(graph.ops) if "tanh" in op.name and op.phase is Phase.FORWARD]
    place = graph.ops.index(joined)
    assert len(made) == 2 and max(made) < place
    assert [op.outputs[0] in joined.inputs for op in (graph.ops[number] for number in made)] == [True, True]
    size_bytes = graph.values[joined.outputs[0]].size_bytes
    assert all(graph.ops[number].workspace_bytes >= size_bytes for number in made)  # it is there already, in eager


def test_data_that_would_wait_for_too_long_is_written_as_it_comes() -> None:
    recorded = graph_of(Computed(lambda y: (_rows_of(y, 1).exp() * y).sin()), X)
    assert op_of(recorded, "zeros_like").once


def test_what_is_read_before_it_is_written_is_pinned() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        z = y + 1
        y.mul_(2)
        return (z.exp() - y.cos()).sin()

    recorded = graph_of(Computed(function), X)
    assert all(op_of(recorded, part).once for part in ("addmm", "add_", "mul__"))
    assert not any(op_of(recorded, part).once for part in ("exp_", "cos_"))


def test_a_copy_of_what_is_written_over_is_part_of_the_operator_too() -> None:
    recorded = graph_of(Computed(lambda y: nn.functional.silu(y, inplace=True).sin().exp()), X)
    joined = op_of(recorded, "silu_")
    assert joined.name.startswith("addmm+clone+silu_") and not joined.once
    sizes = [recorded.graph.values[value].size_bytes for value in joined.outputs]
    assert len(sizes) == 2 and sizes[0] == sizes[1]  # autograd's copy and what was written over


def test_a_copy_that_is_written_over_itself_pins_what_it_is_of() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        other = y.detach().clone()
        y.mul_(2)
        return (other.add_(1) + y.cos()).sin()

    recorded = graph_of(Computed(function), X)
    assert all(op_of(recorded, part).once for part in ("addmm", "clone", "mul__"))


def test_filled_memory_can_be_made_again_and_empty_memory_cannot() -> None:
    def filled(y: torch.Tensor) -> torch.Tensor:
        return (y * torch.empty_like(y).bernoulli_(0.5)).exp()

    def empty(y: torch.Tensor) -> torch.Tensor:
        rows = torch.empty_like(y)
        rows.copy_(y.detach() * 2)
        return (y * rows).exp()

    assert not op_of(graph_of(Computed(filled), X), "bernoulli_").once
    assert op_of(graph_of(Computed(empty), X), "empty_like").once


def test_a_random_operator_reads_the_state_it_draws_from() -> None:
    graph = graph_of(Computed(lambda y: torch.dropout(y.sin(), 0.5, True).exp()), X).graph
    (drawn,) = [op for op in graph.ops if op.random]
    state = [value for value in drawn.inputs if graph.values[value].role == "random states"]
    assert len(state) == 1
    assert "native_dropout" in drawn.name or "bernoulli" in drawn.name


def test_batch_norm_may_run_again_and_its_update_may_not() -> None:
    graph = graph_of(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh()), X).graph
    (norm,) = [
        op for op in graph.ops if op.name.startswith("native_batch_norm") and op.phase is Phase.FORWARD and op.outputs
    ]
    (update,) = [op for op in graph.ops if op.name.endswith(".statistics")]
    assert norm.phase is Phase.FORWARD and update.once
    assert {graph.values[value].name for value in update.mutates} == {"1.running_mean", "1.running_var"}
    assert not {graph.values[value].name for value in norm.inputs} & {"1.running_mean", "1.running_var"}


# Lifetimes


def test_what_python_holds_is_released_when_python_lets_go() -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        large = torch.cat([y] * 50)
        total = large.sum()
        y = y.sin().exp().cos()
        del large
        return (y * total).tanh()

    graph = graph_of(Computed(function), X).graph
    (cat,) = [op for op in graph.ops if op.name.startswith("cat")]
    readers = [op for op in graph.ops if cat.outputs[0] in op.inputs and op.phase is Phase.FORWARD]
    assert [op.name.split("_")[0] for op in readers] == ["sum", "release"]
    order = [op.name.split("_")[0] for op in graph.ops]
    assert order.index("cos") < order.index("release") < order.index("tanh")


def test_outputs_live_as_long_as_the_user_holds_them() -> None:
    module = Computed(lambda y: torch.cat([y.sin()] * 50))
    let_go, held = (graph_of(module, X, mean_square, holds_outputs=holds).graph for holds in (False, True))
    (output,) = [index for index, value in enumerate(held.values) if value.role == "outputs"]
    assert output in held.targets
    assert not any(let_go.values[target].role == "outputs" for target in let_go.targets)
    assert held.end_bytes == let_go.end_bytes + held.values[output].size_bytes


def test_what_the_loss_and_backward_make_runs_once() -> None:
    graph = graph_of(Net(), batch(), mean_square).graph
    loss = next(place for place, op in enumerate(graph.ops) if op.phase is Phase.LOSS)
    assert graph.ops[loss].seconds == 0.0
    assert all(op.once for op in graph.ops[loss:])
    assert any(not op.once for op in graph.ops[:loss])
    gradients = {graph.values[target].role for target in graph.targets}
    assert "gradients" in gradients


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside = nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, self.before(x).tanh(), use_reentrant=False)


def test_what_backward_asked_for_and_holds_stays_until_it_lets_go() -> None:
    """A checkpoint holds its input while it runs its region again; it cannot be dropped and brought back meanwhile."""
    recorded = graph_of(_Checkpointed(), X, mean_square)
    (given,) = next(op for op in recorded.graph.ops if op.name.startswith("tanh")).outputs
    backward = [op for op in recorded.graph.ops if op.phase is Phase.BACKWARD]
    names = [op.name.rpartition("_")[0] for op in backward]
    first = names.index("addmm")  # the region runs again from here, until its first layer has its gradient
    region = ["addmm", "tanh", "mm", "mm", "sum", "tanh_backward", "mm", "mm"]
    assert names[first : first + len(region)] == region
    assert all(given in op.inputs for op in backward[first : first + len(region)])


def test_what_a_node_saved_is_there_until_it_has_summed_its_results() -> None:
    """The gradient of a row that was added to all rows is summed while autograd still holds what the product saved."""
    recorded = graph_of(Computed(lambda y: y.exp() * y[:1].sin()), X, mean_square)
    exp = op_of(recorded, "exp").outputs[0]
    sums = [op for op in recorded.graph.ops if op.name.startswith("sum") and exp in op.inputs]
    assert sums
