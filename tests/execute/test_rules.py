"""What must never happen: other results without an error, or more memory than the budget without a word."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import rematch
from rematch.execute import runner
from rematch.graph import Graph, Schedule
from rematch.planning.settings import AUTO, TAPE
from tests.captures import UNLIMITED_BYTES, Given
from tests.modules import BATCH, WIDTH, Net, batch, mean_square
from tests.taped import Calls
from tests.training import assert_same_steps, measured_peak, step_of, train

pytestmark = pytest.mark.usefixtures("engine")
on_tape = pytest.mark.parametrize("engine", [TAPE], indirect=True)
# Replay cannot be had there, and says so if it is asked for.
not_on_replay = pytest.mark.parametrize("engine", [TAPE, AUTO], indirect=True)
CPU = torch.device("cpu")
STEP = step_of(batch(), mean_square)


@pytest.fixture(autouse=True)
def fixed_parameters() -> None:
    torch.manual_seed(0)


def wrap(plain: nn.Module, sample: Any = None, **options: Any) -> nn.Module:
    """A copy of `plain` made to train in three quarters of its memory; `plain` stays as it is."""
    return rematch.remat(copy.deepcopy(plain), sample, **{"budget": "75%", "time_limit": 0.5, **options})


def assert_alike(wrapped: nn.Module, plain: nn.Module, step: Callable[[nn.Module], Any] = STEP, steps: int = 3) -> None:
    assert_same_steps(train(wrapped, step, steps=steps), train(plain, step, steps=steps))
    assert any(plan.recomputed for plan in rematch.plans_of(wrapped))


# What changes after planning


def _doubled(_: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


@pytest.mark.parametrize("trained", [False, True], ids=["before_training", "after_training"])
def test_hooks_added_later_count(trained: bool) -> None:
    plain = Net()
    wrapped = wrap(plain, batch())
    if trained:
        assert_alike(wrapped, plain)
    handles = [module.blocks[1].register_forward_pre_hook(_doubled) for module in (plain, wrapped)]
    assert_alike(wrapped, plain)
    for handle in handles:
        handle.remove()
    assert_alike(wrapped, plain)


@pytest.mark.parametrize("accumulate", [False, True])
def test_replaced_parameters_are_found(accumulate: bool) -> None:
    plain, other = Net(), Net()
    wrapped = wrap(plain, batch(), budget="80%", accumulate=accumulate)
    assert_alike(wrapped, plain, steps=1)
    for module in (plain, wrapped):
        module.load_state_dict({name: tensor.clone() for name, tensor in other.state_dict().items()}, assign=True)
        module.head.weight = nn.Parameter(other.head.weight.detach().cos())
    assert_alike(wrapped, plain)
    value = mean_square(wrapped(batch()))
    (gradient, nothing) = torch.autograd.grad(
        value, [wrapped.head.weight, torch.ones(1, requires_grad=True)], allow_unused=True
    )
    assert gradient is not None and nothing is None
    assert wrapped.head.weight.grad is None


class Counting(Net):
    calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return super().forward(x * self.calls, scale)


def test_a_forward_that_counts_its_calls_is_not_recorded_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings: list[Any] = []
    record = runner.record
    monkeypatch.setattr(runner, "record", lambda *args, **options: recordings.append(args) or record(*args, **options))
    plain = Counting()
    wrapped = wrap(plain, batch())
    assert_alike(wrapped, plain, steps=9)
    assert wrapped.calls == plain.calls == 9
    assert len(recordings) <= 5


# Random numbers and buffers


class _Noisy(torch.autograd.Function):
    """Draws in forward what only backward needs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, torch.rand_like(x))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x, noise = ctx.saved_tensors
        return gradient * noise * x.cos()


class Noisy(Net):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = _Noisy.apply(block(x))
        return self.head(x)


def test_random_numbers_are_drawn_where_eager_draws_them() -> None:
    plain = Noisy()

    def step(module: nn.Module) -> torch.Tensor:
        first, second = module(batch()), module(batch() * 2)
        value = mean_square(F.dropout(first, 0.3)) + mean_square(second)
        value.backward()
        return value

    assert_alike(wrap(plain, batch()), plain, step)


class Averaging(nn.Module):
    """Reads a buffer, updates it and reads it again; `hidden` from autograd's version counter."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.hidden = hidden
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(3))
        self.register_buffer("average", torch.ones(2 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = (y + self.average).sin().exp()
        changed = self.average.data if self.hidden else self.average
        with torch.no_grad():
            changed.mul_(0.9).add_(y.mean(0), alpha=0.1)
        for layer in self.layers:
            z = (layer(z) - self.average).tanh().exp()
        return z


@pytest.mark.parametrize("hidden", [False, True])
def test_buffers_that_are_read_and_then_updated(hidden: bool) -> None:
    plain = Averaging(hidden)
    assert_alike(wrap(plain, batch(), budget="85%"), plain)


# Threads


def in_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns in a thread of its own; its error is raised here."""
    returned: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return returned[0]


def gradients_after(module: nn.Module, step: Callable[[nn.Module], Any], steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(5)
    for _ in range(steps):
        step(module)
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("ahead", [True, False], ids=["with_sample", "at_first_call"])
def test_backward_in_another_thread(ahead: bool) -> None:
    plain = Net()
    wrapped = wrap(plain, batch() if ahead else None, budget="85%")

    def step(module: nn.Module) -> None:
        value = mean_square(module(batch()))
        in_thread(value.backward)

    got, expected = gradients_after(wrapped, step), gradients_after(plain, step)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", [TAPE], indirect=True)  # Dynamo itself cannot trace in two threads at once
def test_two_threads_take_their_first_step_at_once() -> None:
    plains = [Net(norm=False).eval() for _ in range(2)]
    wrapped = [wrap(plain, budget="85%") for plain in plains]
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    before_backward = threading.Barrier(2, timeout=60)

    def step(module: nn.Module) -> None:
        value = mean_square(module(batch()))
        before_backward.wait()
        value.backward()
        module(batch())  # ends what the first step may have left

    work = [threading.Thread(target=step, args=(module,)) for module in wrapped]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    for ours, plain in zip(wrapped, plains, strict=True):
        mean_square(plain(batch())).backward()
        pairs = zip(ours.parameters(), plain.parameters(), strict=True)
        assert all(p.grad is not None and torch.equal(p.grad, q.grad) for p, q in pairs)
    assert torch.autograd._engine_run_backward is engine  # type: ignore[attr-defined]
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


# The budget, in any order of forward, zero_grad and backward


def held_bytes(module: nn.Module, *others: torch.Tensor) -> int:
    """What is there before a step."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    tensors = [*module.parameters(), *module.buffers(), *gradients, *others]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def plainly(module: nn.Module, x: torch.Tensor) -> None:
    mean_square(module(x)).backward()
    module.zero_grad()


def zeroing_between(module: nn.Module, x: torch.Tensor) -> None:
    """As Lightning does."""
    value = mean_square(module(x))
    module.zero_grad()
    value.backward()


def zeroing_late(module: nn.Module, x: torch.Tensor) -> None:
    value = mean_square(module(x))
    value.backward()
    mean_square(module(x)).backward()
    module.zero_grad()


def accumulating(module: nn.Module, x: torch.Tensor) -> None:
    mean_square(module(x)).backward()


@pytest.mark.parametrize("step", [plainly, zeroing_between, zeroing_late, accumulating])
def test_the_budget_holds_in_any_order(step: Callable[[nn.Module, torch.Tensor], None]) -> None:
    plain, x = Net(), batch()
    wrapped = wrap(plain, x, budget="80%")
    for number in range(4):
        before_bytes = held_bytes(wrapped, x)
        torch.manual_seed(number)
        if number == 0:
            step(wrapped, x)
            peak_bytes = 0
        else:
            peak_bytes, _ = measured_peak(CPU, lambda: step(wrapped, x))
        torch.manual_seed(number)
        step(plain, x)
        for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
        budget_bytes = rematch.plans_of(wrapped)[-1].figures.budget_bytes
        assert before_bytes + peak_bytes <= budget_bytes, f"step {number}"
    assert any(plan.recomputed for plan in rematch.plans_of(wrapped))


def test_an_optimizer_that_was_not_announced_is_seen() -> None:
    plain = Net()
    wrapped = wrap(plain, batch(), budget="90%")
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        mean_square(wrapped(batch())).backward()
        optimizer.step()
    *_, last = rematch.plans_of(wrapped)
    parts = {part.role: part.size_bytes for part in last.parts}
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert parts["already allocated"] == sum(tensor.nbytes for tensor in states)
    assert last.figures.peak_bytes <= last.figures.budget_bytes


def test_an_optimizer_that_was_announced_is_counted_from_the_start() -> None:
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters())
    wrapped = rematch.remat(plain, batch(), budget="100%", optimizer=optimizer, time_limit=1.0)
    (plan,) = rematch.plans_of(wrapped)
    state_bytes = next(part.size_bytes for part in plan.parts if part.role == "already allocated")
    for _ in range(2):
        optimizer.zero_grad()
        mean_square(wrapped(batch())).backward()
        optimizer.step()
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert state_bytes == sum(tensor.nbytes for tensor in states)
    assert rematch.plans_of(wrapped) == (plan,)


# Surroundings


class Normed(nn.Module):
    """Autocast gives a layer norm bfloat16, and its own parameters are float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.gelu(norm(layer(x)))
        return x


@not_on_replay
def test_autocast_into_layer_norm() -> None:
    plain = Normed()

    def step(module: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            value = mean_square(module(batch()))
        value.backward()
        return value

    assert_alike(wrap(plain), plain, step)


@not_on_replay
def test_inside_a_dispatch_mode() -> None:
    plain = Net()
    wrapped = wrap(plain)

    def step(module: nn.Module) -> torch.Tensor:
        with Calls() as calls:
            value = mean_square(module(batch()))
            value.backward()
        assert torch.ops.aten.addmm.default in calls.seen
        return value

    assert_alike(wrapped, plain, step)


@on_tape
def test_flops_of_recomputation_are_counted() -> None:
    plain = Net()
    wrapped = wrap(plain, batch(), budget="200%", solver=_every_product_twice())

    def flops(module: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            STEP(module)
        return counter.get_total_flops()

    assert flops(wrapped) > flops(plain)


def _every_product_twice() -> rematch.solvers.Solver:
    from tests.captures import Given, recomputing

    return Given(lambda graph: recomputing(graph, lambda op: "addmm" in op.name))


def test_a_plan_that_torch_compile_bypasses_warns_once() -> None:
    plain = Net(norm=False).eval()
    wrapped = wrap(plain, batch())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(wrapped, backend="eager")
        outputs = [compiled(batch()) for _ in range(3)]
    ours = [str(warning.message) for warning in caught if "rematch" in str(warning.message)]
    assert len(ours) == 1 and "the budget is not kept" in ours[0]
    assert all(torch.equal(output, plain(batch())) for output in outputs)


def test_calls_without_gradients_run_plainly_and_plan_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Net()
    wrapped = wrap(plain)
    monkeypatch.setattr(runner, "record", _never)
    for mode in (torch.no_grad, torch.inference_mode):
        for size in (BATCH, 3):
            torch.manual_seed(0)
            with mode():
                got = wrapped(batch(size))
            torch.manual_seed(0)
            with mode():
                assert torch.equal(got, plain(batch(size)))
    assert rematch.plans_of(wrapped) == ()


def _never(*_: Any, **__: Any) -> Iterator[None]:
    raise AssertionError("there was nothing to record")


class _Written(nn.Module):
    """Writes what it computes into memory that was there before, a part after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, count = torch.zeros_like(x), len(x) // 8
        for part in (slice(0, count), slice(count, 2 * count)):
            rows[part] = self.inner(x[part]).tanh()
        return torch.relu(self.outer(rows) * rows.sigmoid()) + x


@on_tape
def test_what_is_written_part_by_part_is_recomputed_as_a_whole() -> None:
    plain, x = nn.Sequential(*[_Written() for _ in range(4)]), torch.randn(BATCH, WIDTH)
    wrapped = wrap(plain, x, loss=mean_square, budget="50%", time_limit=3.0)
    (plan,) = rematch.plans_of(wrapped)
    assert any("zeros_like+copy_+copy_" in entry.name for entry in plan.recomputed)
    step = step_of(x, mean_square)
    assert_alike(wrapped, plain, step)
    wrapped.zero_grad(set_to_none=True)
    before_bytes = held_bytes(wrapped, x)
    peak_bytes, _ = measured_peak(CPU, lambda: step(wrapped))
    assert before_bytes + peak_bytes <= plan.figures.budget_bytes


def _first_block_again_after_the_loss(graph: Graph) -> Schedule:
    """What the first operators of forward make is computed again as soon as the loss is known, and read much later."""
    ops = list(graph.order)
    loss = ops.index(graph.loss)
    early = [op for op in ops[: loss // 4] if not graph.ops[op].once]
    return Schedule.from_ops(graph, [*ops[: loss + 1], *early, *ops[loss + 1 :]])


@on_tape
def test_a_plan_says_when_the_tape_recomputes() -> None:
    """It does when backward asks, whatever the schedule says, and that is what the plan predicts."""
    plain, x = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]), batch()
    solver = Given(_first_block_again_after_the_loss)
    wrapped = wrap(plain, x, loss=mean_square, budget=UNLIMITED_BYTES, solver=solver)
    step = step_of(x, mean_square)
    assert_alike(wrapped, plain, step)
    plan = rematch.plans_of(wrapped)[-1]
    wrapped.zero_grad(set_to_none=True)
    before_bytes = held_bytes(wrapped, x)
    peak_bytes, _ = measured_peak(CPU, lambda: step(wrapped))
    assert plan.figures.peak_bytes is not None
    assert abs(before_bytes + peak_bytes - plan.figures.peak_bytes) < x.nbytes // 4
