"""A tape among other things that watch or change what torch does, and operators that must not run twice."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rematch.execute.tape import Budget, Parting, TapePlan, drop_all, observe, run
from tests.modules import Net, batch, mean_square
from tests.taped import plan_for, taped, taped_copy
from tests.training import assert_same_steps, same_bits, step_of, train

ROWS = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def gradients_of(module: nn.Module, x: torch.Tensor = ROWS) -> list[torch.Tensor]:
    module.zero_grad()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        mean_square(module(x)).backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def assert_same_gradients(one: nn.Module, other: nn.Module, x: torch.Tensor = ROWS) -> None:
    mine, theirs = gradients_of(one, x), gradients_of(other, x)
    assert len(mine) == len(theirs) > 0
    assert all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8), nn.Tanh())


class Failing(nn.Module):
    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.body(x)
        if self.fails:
            raise KeyError("mine")
        return y


def test_an_exception_of_forward_passes_and_leaves_nothing_behind() -> None:
    plain = Failing()
    module = taped_copy(plain, ROWS)
    module.fails = True
    with pytest.raises(KeyError, match="mine"):
        module(ROWS)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    module.fails = False
    assert_same_gradients(module, plain)
    assert module.calls == 2


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_garbage_collector_rests_in_forward_alone(on: bool, fails: bool) -> None:
    seen: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(gc.isenabled())
        if fails:
            raise KeyError("mine")
        return x.exp()

    if not on:
        gc.disable()
    try:
        with pytest.raises(KeyError) if fails else nullcontext():
            run(forward, (torch.ones(3, requires_grad=True),), {}, plan=TapePlan((), frozenset(), frozenset()))
        assert (seen, gc.isenabled()) == ([False], on)
    finally:
        gc.enable()


def test_calls_without_gradients_run_plain() -> None:
    module = taped(mlp(), TapePlan((), frozenset(), frozenset()), parted=pytest.fail)
    with torch.no_grad():
        module(ROWS)


def test_flops_of_recomputation_are_counted() -> None:
    counts = []
    for module in (mlp(), taped_copy(mlp(), ROWS)):
        with FlopCounterMode(display=False) as counter:
            mean_square(module(ROWS)).backward()
        counts.append(counter.get_total_flops())
    product = 2 * 4 * 8 * 16
    assert counts[1] == counts[0] + 2 * product  # both products run again, for GELU and for Tanh


@pytest.mark.parametrize("inside", [False, True])
def test_hooks_of_the_user(inside: bool) -> None:
    class Offloading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if inside:
                with save_on_cpu():
                    x = self.body(x)
            return self.body(x).exp()

    plain = Offloading()
    module = taped_copy(plain, ROWS)
    if inside:
        assert_same_gradients(module, plain)
        return
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor.detach().clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        module(ROWS)
        assert any(tensor.data_ptr() == ROWS.data_ptr() for tensor in packed), (
            "what the tape keeps goes to others' hooks"
        )
        mine = [gradient.clone() for gradient in gradients_of(module)]
    assert all(same_bits(a, b) for a, b in zip(mine, gradients_of(plain), strict=True))


def test_where_hooks_are_forbidden_it_runs_plain() -> None:
    module = taped(mlp(), None, budget=Budget(0))
    with disable_saved_tensors_hooks("not here"):
        assert_same_gradients(module, mlp())


def test_function_transforms_around() -> None:
    plain = mlp().eval()
    module = taped_copy(plain, ROWS)
    found = []
    for each in (plain, module):
        parameters = dict(each.named_parameters())

        def loss(values: Any, x: torch.Tensor, each: nn.Module = each) -> torch.Tensor:
            return mean_square(torch.func.functional_call(each, values, (x,)))

        found.append(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, ROWS))
    assert all(same_bits(found[0][name], found[1][name]) for name in found[0])


class Penalised(nn.Module):
    """Asks for gradients inside forward: by a function transform, or by autograd."""

    def __init__(self, transform: bool) -> None:
        super().__init__()
        self.body = mlp().eval()
        self.transform = transform

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.transform:
            penalty = torch.func.grad(lambda y: self.body(y).sum())(x.exp())
        else:
            y = x.exp().requires_grad_()
            (penalty,) = torch.autograd.grad(self.body(y).sum(), y, create_graph=True)
        return self.body(x).tanh() * penalty


@pytest.mark.parametrize("transform", [False, True])
def test_gradients_inside_forward(transform: bool) -> None:
    plain = Penalised(transform)
    assert_same_gradients(taped_copy(plain, ROWS), plain)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x).exp()).sin() * 2.0


def test_a_tape_inside_a_tape() -> None:
    plain = Outer(mlp())
    nested = Outer(taped_copy(mlp(), ROWS))
    nested.load_state_dict(plain.state_dict())
    with torch.random.fork_rng():
        plan = drop_all(observe(nested, (ROWS,), {}))
    assert_same_gradients(taped(nested, plan, parted=pytest.fail), plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_part_is_compiled_and_left_alone() -> None:
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(len(graph.graph.nodes))
        return graph.forward

    class Broken(nn.Module):
        """Leaves the compiled graph in the middle, and runs an operator there."""

        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.body(x)
            torch._dynamo.graph_break()
            return self.body(eager_only(x))

    eager_only = torch._dynamo.disable(lambda x: x.sin() * x, recursive=False)
    plain = Outer(Broken())
    compiled = copy.deepcopy(plain)
    compiled.inner = torch.compile(compiled.inner, backend=backend)
    parted: list[Parting] = []
    with torch.random.fork_rng():
        plan = drop_all(observe(compiled, (ROWS,), {}))
    assert len(seen) == 2
    assert_same_gradients(taped(compiled, plan, parted=parted.append), plain)
    assert not parted
    assert len(seen) == 2


def test_profilers_and_marks() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.profiler.record_function("body"):
                return self.body(x)

    plain = Marked()
    module = taped_copy(plain, ROWS)
    with torch.autograd.profiler.profile():
        assert_same_gradients(module, plain)


def test_higher_order_operators_are_opaque() -> None:
    from torch._higher_order_ops.wrap import wrap

    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return wrap(lambda y: y.sin() * y, self.first(x).exp()).tanh()

    plain = Wrapping()
    assert_same_gradients(taped_copy(plain, ROWS), plain)


RUNS: list[int] = []


@torch.library.custom_op("rematch_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    RUNS.append(1)
    return x * 2.0


@torch.library.custom_op("rematch_tests::count_up", mutates_args=("counter",))
def count_up(counter: torch.Tensor) -> None:
    counter.add_(1)


double.register_autograd(lambda _, grad: grad * 2.0)


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (double(self.linear(x)) * double(x) + self.counter).exp()
        count_up(self.counter)
        return (y + self.counter).sin()


def test_operators_of_others_run_once() -> None:
    plain = Foreign()
    module = taped_copy(plain, ROWS)
    RUNS.clear()
    step = step_of((ROWS,), mean_square)
    assert_same_steps(train(module, step, steps=2), train(plain, step, steps=2))
    assert len(RUNS) == 8


class Statistics(nn.Module):
    """Reads running statistics that it also updates, with and without a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.BatchNorm1d(8).eval()
        self.register_buffer("mean", torch.zeros(8))
        self.linear = nn.Linear(8, 8)

    def train(self, mode: bool = True) -> Statistics:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.linear(x) - self.norm.running_mean).exp()
        y = self.norm(y) * self.norm.running_var
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
        y = (y * self.mean.clone()).tanh()
        y = self.frozen(self.norm(y)).sin()
        self.frozen.running_mean.data.copy_(self.norm.running_mean)
        self.mean.mul_(0.5)
        return y * (y + self.mean).exp()


def test_buffers_that_forward_updates() -> None:
    plain = Statistics()

    def step(module: nn.Module) -> torch.Tensor:
        first = module(ROWS)
        second = module(ROWS * 2.0)  # updates before the first backward
        value = mean_square(first)
        value.backward()
        mean_square(second).backward()
        return value

    # Compared one forward at a time, for here eager itself raises where a saved buffer changes.
    assert_same_steps(*(train(module, step_of((ROWS,), mean_square)) for module in (taped_copy(plain, ROWS), plain)))
    normed = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Tanh())
    assert_same_steps(*(train(module, step) for module in (taped_copy(normed, ROWS), normed)))


def test_batch_norm_runs_again_without_its_statistics() -> None:
    given = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.native_batch_norm.default:
                given.append(args[3:5])
            return func(*args, **(kwargs or {}))

    module = taped_copy(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()), ROWS)
    value = mean_square(module(ROWS))
    with Watching():
        value.backward()
    assert given == [(None, None)]


def test_random_numbers_of_a_generator() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.generator = torch.Generator().manual_seed(9)

        def __deepcopy__(self, memo: Any) -> Drawing:
            copied = Drawing()
            copied.load_state_dict(self.state_dict())
            copied.generator.set_state(self.generator.get_state())
            return copied

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            y = y * torch.rand(y.shape, generator=self.generator)
            y = y * torch.empty_like(y.t()).bernoulli_(0.5, generator=self.generator).t()
            return F.dropout(y + torch.randn_like(y)).exp()

    plain = Drawing()
    module = taped_copy(plain, ROWS)
    step = step_of((ROWS,), mean_square)
    assert_same_steps(train(module, step), train(plain, step))
    assert same_bits(module.generator.get_state(), plain.generator.get_state())


def test_writes_that_the_mode_does_not_see() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x) + 1.0
            with torch._C._DisableTorchDispatch():
                y.mul_(0.5)
            return (y.sin() + y).exp()

    plain = Hidden()
    assert_same_gradients(taped_copy(plain, ROWS), plain)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_without_a_storage_or_a_version() -> None:
    with torch.inference_mode():
        frozen = torch.rand(8)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.rand(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                mask = (x + frozen) > 0
            y = self.linear(x).masked_fill(mask, 0.5)
            sparse = torch.eye(4).to_sparse() * 2.0
            y = torch.sparse.mm(sparse, y.exp())
            scales, zeros = torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int64)
            quantized = torch.quantize_per_channel(ROWS, scales, zeros, 0, torch.qint8)
            return (y * quantized.dequantize()).tanh() * self.scale

    plain = Odd()
    assert_same_gradients(taped_copy(plain, ROWS), plain)


def test_wrapper_subclasses_are_kept() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).exp()
            z = TwoTensor(y.detach(), y.detach() * 2.0).requires_grad_()
            (gradient,) = torch.autograd.grad((z.sin() * z).tanh().sum(), z)
            return y * gradient.b.sin()

    plain = Wrapped()
    assert_same_gradients(taped_copy(plain, ROWS), plain)
    x = TwoTensor(ROWS.clone(), ROWS * 2.0).requires_grad_()
    found = []
    for module in (nn.Tanh(), taped(nn.Tanh(), None, budget=Budget(0))):
        found.append(torch.autograd.grad(module(x.exp()).sum(), x)[0])
    assert same_bits(found[0].a, found[1].a) and same_bits(found[0].b, found[1].b)


def test_hooks_of_modules_count() -> None:
    plain = Net(depth=1)
    module = taped_copy(plain, batch(8))
    for each in (plain, module):
        each.blocks[0].register_forward_pre_hook(lambda _, args: (args[0] * 2.0,))
    parted: list[Parting] = []
    doubled = taped(copy.deepcopy(plain), plan_for(plain, batch(8)), parted=parted.append)
    assert_same_gradients(doubled, plain, batch(8))
    assert not parted
    with pytest.raises(AssertionError, match="left the plan"):
        module(batch(8))


def test_output_of_run() -> None:
    output, parted = [], []
    output.append(run(mlp(), (ROWS,), {}, plan=None, budget=Budget(0), parted=parted.append))
    assert len(parted) == 1 and parted[0].position == 0 and len(parted[0].calls) > 4
