"""Graphs of small modules: which kernels are operators, which tensors are values, and what may run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import rematch
from benchmarks.models import TINY
from rematch.capture.aten import InPlaceOnCopy, aten
from rematch.capture.joint.read import Capture
from rematch.capture.memory import PeakMemory
from rematch.graph import Op, Phase
from tests.captures import Computed, ReadsItsStatistics, capture_of

SAMPLE = torch.linspace(-1, 1, 20).reshape(4, 5)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def targets_of(capture: Capture, phase: Phase = Phase.FORWARD) -> list[list[str]]:
    """Per operator that runs kernels, their names."""
    return [
        [_packet(kernel.target) for kernel in kernels]
        for op, kernels in zip(capture.graph.ops, capture.kernels, strict=True)
        if kernels and op.phase is phase
    ]


def _packet(target: Any) -> str:
    return str(target).removeprefix("aten.").partition(".")[0]


def op_of(capture: Capture, kernel: str) -> Op:
    """The one operator of forward that runs a kernel of this name."""
    (found,) = (
        op
        for op, kernels in zip(capture.graph.ops, capture.kernels, strict=True)
        if op.phase is Phase.FORWARD and any(_packet(k.target) == kernel for k in kernels)
    )
    return found


def sizes_of(capture: Capture, role: str) -> list[int]:
    return sorted(value.size_bytes for value in capture.graph.values if value.role == role)


# Operators and values


def test_views_tuples_and_detached_tensors_fold_into_storages() -> None:
    def shown(y: torch.Tensor) -> torch.Tensor:
        left, right = y.view(2, 2, 6).transpose(0, 1).chunk(2, dim=-1)
        return left.squeeze().detach() * right.unsqueeze(0).exp()

    capture = capture_of(Computed(shown), SAMPLE)
    assert targets_of(capture) == [["addmm"], ["exp"], ["mul"]]
    product = op_of(capture, "mul")
    assert set(product.inputs) == {*op_of(capture, "addmm").outputs, *op_of(capture, "exp").outputs}


def test_an_operator_with_several_results_has_several_values() -> None:
    capture = capture_of(Computed(lambda y: y.max(dim=1)[0]), SAMPLE)
    values = [capture.graph.values[index] for index in op_of(capture, "max").outputs]
    assert [value.size_bytes for value in values] == [4 * 4, 4 * 8], "numbers and their indices"


@pytest.mark.parametrize("name", ["mlp", "batch_norm_transposed", "gpt_softmax", "resnet_bottleneck"])
def test_the_kernels_are_those_that_eager_runs(name: str) -> None:
    case = TINY[name]
    module, (args, kwargs) = case.build(), case.sample()
    with _Kernels() as eager:
        outputs = [y for y in pytree.tree_leaves(module(*args, **kwargs)) if y.requires_grad]
        torch.autograd.grad(outputs, list(module.parameters()), [torch.ones_like(y) for y in outputs])
    capture = capture_of(module, (args, kwargs))
    captured = Counter(_name(kernel.node.target) for kernels in capture.kernels for kernel in kernels)
    assert not captured - eager.counts, "captured but not run by eager"
    free = {"_unsafe_view", "clone", "detach", "empty", "expand", "ones_like", "permute", "select", "slice", "split"}
    free |= {"squeeze", "t", "transpose", "unbind", "unsafe_split", "unsqueeze", "view"}
    assert set(eager.counts - captured) <= free, "run by eager but not captured"


class _Kernels(TorchDispatchMode):
    """Counts what eager runs; an operator that works in place counts as the one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[_name(func)] += 1
        return func(*args, **(kwargs or {}))


def _name(target: Any) -> str:
    return target.overloadpacket.__name__.rstrip("_")


@pytest.mark.parametrize(
    ("written", "kernels"), [(lambda y: y.exp(), ["exp"]), (lambda y: y.exp().double(), ["exp", "_to_copy", "copy"])]
)
def test_what_is_written_to_part_of_a_tensor_is_copied_only_to_change_its_type(
    written: Callable[[torch.Tensor], torch.Tensor], kernels: list[str]
) -> None:
    def assign(y: torch.Tensor) -> torch.Tensor:
        padded = y.new_zeros(4, 9)
        padded[:, :6] = written(y)
        return padded.sin()

    names = [name for operator in targets_of(capture_of(Computed(assign), SAMPLE)) for name in operator]
    assert names == ["addmm", "new_zeros", *kernels, "slice_scatter", "sin"]


def test_module_paths_are_kept_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ModuleDict({"inner": nn.Linear(5, 5)})["inner"], nn.GELU())
    graph = capture_of(nn.Sequential(model, nn.Linear(5, 2)), SAMPLE).graph
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        paths = {op.module_path for op in graph.ops if op.phase is phase}
        assert paths == {"0.0", "0.1", "0.2", "1"}


def test_equal_calls_share_their_class_and_others_do_not() -> None:
    graph = capture_of(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)), SAMPLE).graph
    first, second, third = (op.class_key for op in graph.ops if op.phase is Phase.FORWARD)
    assert first == second != third


# Working in place


def test_a_pointwise_kernel_is_part_of_the_operator_before_it() -> None:
    capture = capture_of(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU()), SAMPLE)
    operator = op_of(capture, "relu_")
    assert operator == op_of(capture, "native_batch_norm")
    assert len(operator.outputs) == 3, "the result, and the mean and deviation that backward needs"
    assert operator.class_key != op_of(capture_of(nn.BatchNorm1d(6), torch.rand(4, 6)), "native_batch_norm").class_key


@pytest.mark.parametrize(
    ("function", "in_place", "why"),
    [
        (lambda y: y.relu(), True, "nobody else reads the input"),
        (lambda y: y.t().relu(), True, "a transposed view shows the whole input"),
        (lambda y: y + 1, True, "numbers are no tensors"),
        (lambda y: y.relu() + y.exp(), False, "another operator reads the input"),
        (lambda y: (y, y.relu()), False, "the input leaves the module"),
        (lambda y: y[:2].relu(), False, "only part of the input is read"),
        (lambda y: y + y.t().reshape(4, 6), False, "a copy of the input is made between"),
        (lambda y: y * y, False, "the input is read twice"),
        (lambda y: y > 0, False, "the result has another type"),
        (lambda y: y + torch.ones(3, 4, 6), False, "the result is larger"),
        (lambda y: y.cumsum(0), False, "the kernel is not pointwise"),
    ],
)
def test_what_a_pointwise_kernel_overwrites(function: Callable[[torch.Tensor], Any], in_place: bool, why: str) -> None:
    capture = capture_of(Computed(lambda y: function(y.sin())), SAMPLE)
    (kernels,) = (kernels for kernels in targets_of(capture) if {"sin", "sin_"} & set(kernels))
    assert (kernels[-1] not in ("sin", "sin_")) == in_place, why


# Random numbers


def test_the_generator_is_noted_before_each_random_operator() -> None:
    capture = capture_of(Computed(lambda y: F.dropout(F.dropout(y, 0.5), 0.2)), SAMPLE)
    graph = capture.graph
    assert len(capture.random_state_of) == 2
    for op, noted in capture.random_state_of.items():
        assert graph.ops[noted].once and not graph.ops[op].once
        assert set(graph.ops[noted].outputs) <= set(graph.ops[op].inputs)
        assert graph.values[graph.ops[noted].outputs[0]].role == "random states"
        assert graph.ops[op].random


def test_numbers_for_memory_that_is_not_contiguous_are_drawn_as_eager_draws_them() -> None:
    capture = capture_of(Computed(lambda y: F.dropout(y.t(), 0.5)), SAMPLE)
    assert ["empty_like", "bernoulli_", "div_"] in targets_of(capture)


# What may run again


def test_a_custom_operator_runs_once() -> None:
    @torch.library.custom_op("rematch_tests::halve", mutates_args=())
    def halve(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    halve.register_fake(torch.empty_like)
    halve.register_autograd(lambda _, gradient: gradient / 2)
    capture = capture_of(Computed(lambda y: halve(y).exp()), SAMPLE)
    assert op_of(capture, "rematch_tests").once
    assert not op_of(capture, "exp").once, "nor is its result overwritten: it may keep what it returns"


def test_readers_of_statistics_that_change_run_once_and_in_order() -> None:
    capture = capture_of(ReadsItsStatistics(), SAMPLE)
    graph = capture.graph
    statistics = {i for i, value in enumerate(graph.values) if value.name.startswith("norm.running")}
    readers = [op for op in graph.ops if op.phase is Phase.FORWARD and statistics.intersection(op.inputs)]
    assert len(readers) == 3
    for op in readers:
        assert op.once == ("native_batch_norm" not in op.name), "batch norm runs again without its statistics"
        assert op.once or op.random


# Rows apart, strides


def test_what_eager_overwrites_in_part_of_a_tensor_is_computed_in_rows_apart() -> None:
    def partly(y: torch.Tensor) -> torch.Tensor:
        y[:, :3].tanh_()
        return y.sin()

    capture = capture_of(Computed(partly), SAMPLE)
    (apart,) = (k.target for kernels in capture.kernels for k in kernels if isinstance(k.target, InPlaceOnCopy))
    assert apart == InPlaceOnCopy(aten.tanh_.default, (4, 1))


class NormsAcross(nn.Module):
    """Batch norm over the middle axis returns other strides than it is traced with."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.outward = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outward(self.norm(self.inward(x).transpose(1, 2)).transpose(1, 2))


def test_strides_are_those_of_real_results() -> None:
    model, x = NormsAcross(), torch.rand(4, 3, 5)
    normalized = []
    model.norm.register_forward_hook(lambda *call: normalized.append(call[2].stride()))
    model(x)
    capture = capture_of(model, x)
    (node,) = (
        kernel.node
        for kernels in capture.kernels
        for kernel in kernels
        if kernel.node.target is aten.native_batch_norm.default
    )
    assert node.meta["val"][0].stride() == normalized[0]


# Around the module


def test_the_loss_takes_the_outputs_and_yields_their_tangents() -> None:
    graph = capture_of(Computed(lambda y: (y.exp(), y.sin(), y.detach().cos())), SAMPLE).graph
    (loss,) = (op for op in graph.ops if op.phase is Phase.LOSS)
    assert loss.once
    assert set(loss.inputs) == set(graph.held)
    assert len(graph.held) == 3
    tangents = [index for index in loss.outputs if graph.values[index].role == "tangents"]
    assert len(tangents) == 2, "one for each differentiable output"
    backward = [op for op in graph.ops if op.phase is Phase.BACKWARD]
    assert set(tangents) <= {index for op in backward for index in op.inputs}


def test_parameters_buffers_and_inputs_are_resident_and_each_storage_counts_once() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.BatchNorm1d(5))
    model[1].weight = model[0].weight
    capture = capture_of(model, SAMPLE)
    assert sizes_of(capture, "parameters") == [4 * 5] * 4 + [4 * 25]
    assert sizes_of(capture, "inputs") == [4 * 20]
    assert sizes_of(capture, "buffers") == [8, 4 * 5, 4 * 5]


def test_inference_has_no_loss_and_keeps_its_outputs() -> None:
    module = Computed(lambda y: y.exp()).requires_grad_(False)
    graph = capture_of(module, SAMPLE).graph
    assert graph.loss is None
    assert [graph.values[index].size_bytes for index in graph.targets] == [4 * 4 * 6]


# Planning what does not fit


def test_a_model_that_could_not_be_trained_here_is_planned_without_allocating() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 1024), nn.Linear(1024, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                x = self.down(F.gelu(self.up(x)))
            return x

    sample = torch.zeros(1, 32).expand(2**21, 32)
    with PeakMemory(torch.device("cpu")) as used:
        plan = rematch.plan(Large(), sample, budget="50%", device="h100", time_limit=1.0, progress=False)
    assert plan.figures.baseline_peak_bytes > 100 * 2**30
    assert plan.figures.peak_bytes <= plan.figures.budget_bytes
    assert used.peak_bytes < 2**20
