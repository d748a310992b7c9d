"""Values that move to host memory: the same bits, both budgets kept, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rematch
from rematch.capture.cost import Call, Profile
from rematch.capture.measure import Measurer
from rematch.errors import BudgetInfeasible, RematchError
from rematch.execute.module import runner_of
from rematch.execute.runner import Runner
from rematch.execute.transfers import HostMemory
from rematch.graph import Link
from rematch.planning.settings import REPLAY, TAPE
from tests.captures import UNLIMITED_BYTES, Given, shuttling
from tests.training import assert_same_steps, assert_trains_alike, deterministic, step_of, train

HOST = 64 * 2**20


@pytest.fixture(autouse=True)
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving costs next to nothing, so that plans move what they can."""
    monkeypatch.setattr("rematch.planning.host.link_to", lambda device, host_bytes: Link(1e13, 1e13, host_bytes))


@pytest.fixture
def equal_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator takes a millisecond, so that a plan does not depend on how busy the machine is."""
    measured = Measurer.profile

    def profile(self: Measurer, call: Call) -> Profile:
        found = measured(self, call)
        return replace(found, cost=replace(found.cost, seconds=1e-3))

    monkeypatch.setattr(Measurer, "profile", profile)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def moving(module: nn.Module, sample: Any, **options: Any) -> nn.Module:
    """A copy of the module whose plan moves values: with a budget as a solver finds it, without one all that can."""
    if "budget" not in options:
        options = {"budget": UNLIMITED_BYTES, "solver": Given(shuttling), **options}
    settings: dict[str, Any] = {"offload": HOST, "loss": loss, "time_limit": 1.0, **options}
    made = rematch.remat(copy.deepcopy(module), sample, progress=False, **settings)
    assert all(plan.moved is not None for plan in rematch.plans_of(made))
    return made


def host_of(module: nn.Module) -> HostMemory:
    runner = runner_of(module)
    assert runner is not None and runner.host is not None
    return runner.host


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return x + changed


class Attention(nn.Module):
    """A transformer whose queries, keys and values are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out, self.mlp = nn.Linear(32, 96), nn.Linear(32, 32), Block(32, dropout=0.1)

    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(3):
            query, key, value = (part.view(4, 128, 2, 16).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
            mixed = nn.functional.scaled_dot_product_attention(query, key, value)
            x = self.mlp(x + self.out(mixed.transpose(1, 2).reshape(4, 128, 32)))
        return x


class Tied(nn.Module):
    """One weight for the embedding and the head, and one block used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(100, 32), Block(32), nn.Linear(32, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


class Writing(nn.Module):
    """Writes in place, saves values twice and through views, and transposed copies of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(3):
            hidden = self.first(x).relu_()
            written = self.second(hidden * hidden.sin())
            written.mul_(2.0).tanh_()
            left, right = written.view(-1, 2, 32).unbind(1)
            mixed = (left.exp() * right).softmax(-1) * hidden[:, :32].t().contiguous().t()
            x = torch.cat([mixed, right], -1)
        return x


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs in (3, 8, 8):
        layers += [nn.Conv2d(inputs, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], str]] = {
    "mlp": (lambda: nn.Sequential(*[Block(32) for _ in range(3)]), lambda: torch.randn(512, 32), "60%"),
    "attention": (Attention, lambda: torch.randn(4, 128, 32), "60%"),
    "convolutions": (convolutions, lambda: torch.randn(4, 3, 24, 24), "75%"),
    "tied": (Tied, lambda: torch.randint(100, (4, 128)), ""),
    "writing": (Writing, lambda: torch.randn(256, 64), ""),
}


@pytest.mark.parametrize(("family", "engine"), [*((family, TAPE) for family in FAMILIES), ("writing", REPLAY)])
def test_what_moves_comes_back_for_each_use(family: str, engine: str) -> None:
    torch.manual_seed(0)
    make, draw, _ = FAMILIES[family]
    plain, sample = make(), draw()
    module = moving(plain, sample, engine=engine)
    with deterministic():
        assert_trains_alike(module, plain, sample, loss)
    moved = rematch.plans_of(module)[-1].moved
    assert moved is not None and moved.in_bytes >= moved.out_bytes == moved.host_bytes
    taken_bytes = host_of(module).taken_bytes  # replay gives back at once what only forward moves
    assert taken_bytes == moved.host_bytes if engine == TAPE else 0 < taken_bytes <= moved.host_bytes
    assert host_of(module).lent_bytes == 0


@pytest.mark.parametrize(
    ("family", "engine"), [("mlp", TAPE), ("attention", TAPE), ("convolutions", TAPE), ("mlp", REPLAY)]
)
def test_trains_to_the_bit_within_both_budgets(family: str, engine: str) -> None:
    torch.manual_seed(0)
    make, draw, budget = FAMILIES[family]
    plain, sample = make(), draw()
    module = moving(plain, sample, budget=budget, engine=engine)
    step = step_of(sample, loss)
    resident_bytes = sample.nbytes + sum(t.nbytes for t in {*plain.parameters(), *plain.buffers()})
    with deterministic():
        got = train(module, step)
        assert_same_steps(got, train(plain, step))
    plan = rematch.plans_of(module)[-1]
    assert plan.moved is not None and plan.moved.host_bytes <= host_of(module).taken_bytes <= HOST
    for outcome in got[1:]:
        assert outcome.peak_bytes is not None
        assert resident_bytes + outcome.peak_bytes <= plan.figures.budget_bytes + 1024
    assert host_of(module).lent_bytes == 0


@pytest.mark.parametrize("engine", [TAPE, REPLAY])
def test_moves_and_recomputes_in_one_step(mlp: nn.Module, batch: torch.Tensor, engine: str) -> None:
    """There is host memory for four small values: what else does not fit runs again, from what comes back."""
    module = moving(mlp, batch, budget="60%", offload=4 * batch.nbytes, engine=engine)
    plan = rematch.plans_of(module)[-1]
    assert plan.recomputed and plan.moved is not None and plan.moved.host_bytes <= 4 * batch.nbytes
    assert_trains_alike(module, mlp, batch, loss)
    assert host_of(module).taken_bytes <= 4 * batch.nbytes


@pytest.mark.parametrize(
    ("options", "recomputes"), [({}, False), ({"budget": "60%"}, False), ({"budget": "50%", "offload": 2**18}, True)]
)
@pytest.mark.usefixtures("equal_costs")
def test_captured_blocks_move_what_the_plan_says(
    options: dict[str, Any], recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody follows their operators, so what goes to host memory, and when, is part of their patterns."""
    monkeypatch.setattr(Runner, "_keeps_card_waiting", lambda self, route: route.tape is not None)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(*[Block(32) for _ in range(4)]), nn.Sequential(nn.Linear(32, 32), Block(32)))
    sample = torch.randn(512, 32)
    module = moving(plain, sample, engine=TAPE, **options)
    step = step_of(sample, loss)
    resident_bytes = sample.nbytes + sum(parameter.nbytes for parameter in plain.parameters())
    with deterministic():
        got = train(module, step, steps=5)
        assert_same_steps(got, train(plain, step, steps=5))
    plan = rematch.plans_of(module)[-1]
    assert plan.moved is not None and bool(plan.recomputed) == recomputes
    runner = runner_of(module)
    assert runner is not None and max(route.blocks.unseen for route in runner._routes.values() if route.blocks) > 8
    for outcome in got[1:]:
        assert outcome.peak_bytes is not None
        assert resident_bytes + outcome.peak_bytes <= plan.figures.budget_bytes + 1024
    assert plan.moved.host_bytes <= host_of(module).taken_bytes
    assert host_of(module).lent_bytes == 0


@pytest.fixture
def mlp() -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES["mlp"][0]()


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.randn(512, 32)


def test_a_budget_that_recomputation_cannot_keep(batch: torch.Tensor) -> None:
    """The tape runs nothing again inside an autograd Function; all of it can move."""

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                x = _Square.apply(layer(x))  # type: ignore[no-untyped-call]
            return x

    plain = Held()
    options: dict[str, Any] = {"budget": "70%", "loss": loss, "time_limit": 1.0, "progress": False, "engine": "tape"}
    with pytest.raises(BudgetInfeasible):
        rematch.plan(plain, batch, **options)
    module = moving(plain, batch, budget="70%", engine="tape")
    assert_trains_alike(module, plain, batch, loss)
    plan = rematch.plans_of(module)[-1]
    assert "to host memory and" in str(plan) and any("offload: up to 64.0 MiB" in note for note in plan.notes)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        kept = x * 2
        ctx.save_for_backward(kept)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (kept,) = ctx.saved_tensors
        return gradients[0] * kept


def test_gradients_accumulate_and_two_forwards_share_a_backward(mlp: nn.Module, batch: torch.Tensor) -> None:
    module = moving(mlp, batch, accumulate=True)

    def accumulating(either: nn.Module) -> None:
        loss(either(batch)).backward()  # type: ignore[no-untyped-call]
        loss(either(batch.flip(0))).backward()  # type: ignore[no-untyped-call]

    def together(either: nn.Module) -> None:
        (loss(either(batch)) + loss(either(batch.flip(0)))).backward()  # type: ignore[no-untyped-call]

    for step in (accumulating, together):
        assert_same_steps(train(module, step), train(mlp, step))
    assert host_of(module).lent_bytes == 0


@pytest.mark.parametrize("engine", [TAPE, REPLAY])
def test_what_finds_no_room_in_host_memory_stays(mlp: nn.Module, batch: torch.Tensor, engine: str) -> None:
    needed = rematch.plans_of(moving(mlp, batch, engine=engine))[-1].moved
    assert needed is not None
    module = moving(mlp, batch, offload=needed.host_bytes, engine=engine)

    def together(either: nn.Module) -> None:
        (loss(either(batch)) + loss(either(batch.flip(0)))).backward()  # type: ignore[no-untyped-call]

    with pytest.warns(UserWarning, match=r"host memory ran out: what forwards without a backward have moved"):
        assert_same_steps(train(module, together), train(mlp, together))
    assert host_of(module).taken_bytes <= needed.host_bytes


def test_recomputes_where_the_machine_has_no_more(
    mlp: nn.Module, batch: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = moving(mlp, batch, budget="60%")

    def refused(*_: Any) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("rematch.execute.transfers._Buffer", refused)
    with pytest.warns(UserWarning, match="the machine gave 0 B and no more"):
        assert_same_steps(train(module, step_of(batch, loss)), train(mlp, step_of(batch, loss)))
    plan = rematch.plans_of(module)[-1]
    assert plan.moved is None and plan.recomputed


def test_nothing_is_left_behind_by_steps_that_fail_or_have_no_backward(mlp: nn.Module, batch: torch.Tensor) -> None:
    module = moving(mlp, batch)
    step = step_of(batch, loss)
    train(module, step, steps=2)
    taken_bytes = host_of(module).taken_bytes

    def fail(*_: Any) -> None:
        raise ArithmeticError("in the middle")

    first, last = module.get_submodule("0.up"), module.get_submodule("2")
    for break_it in (lambda: last.register_forward_pre_hook(fail), lambda: first.weight.register_hook(fail)):
        broken = break_it()
        with pytest.raises(ArithmeticError):
            step(module)
        broken.remove()
        module.zero_grad(set_to_none=True)
        assert host_of(module).lent_bytes == 0
    module(batch)
    assert host_of(module).lent_bytes == 0 and host_of(module).taken_bytes == taken_bytes
    plain = copy.deepcopy(mlp)
    plain.load_state_dict(module.state_dict())
    assert_same_steps(train(module, step), train(plain, step))


def test_another_order_of_backward_and_a_second_one(mlp: nn.Module, batch: torch.Tensor) -> None:
    module = moving(mlp, batch)

    def twice(either: nn.Module) -> Any:
        value = loss(either(batch))
        value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        value.backward()  # type: ignore[no-untyped-call]

    def partly(either: nn.Module) -> Any:
        last = list(either.children())[-1]
        value = loss(either(batch))
        first = torch.autograd.grad(value, last.up.weight, retain_graph=True)
        value.backward()  # type: ignore[no-untyped-call]
        return first

    for step in (twice, partly):
        assert_same_steps(train(module, step), train(mlp, step))
    assert host_of(module).lent_bytes == 0


def test_what_python_holds_does_not_move(batch: torch.Tensor) -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

        def forward(self, x: torch.Tensor) -> Any:
            self.seen = []
            for layer in self.layers:
                x = layer(x).tanh()
                self.seen.append(x)
            return x

    plain = Holding()
    graph = rematch.trace(plain, batch, loss=loss, progress=False)
    made = [value for op in graph.ops for value in op.outputs if op.name.rpartition("_")[0] == "tanh"]
    assert len(made) == 6 and not any(graph.values[value].movable for value in made)


def test_a_write_to_what_was_saved_is_found_as_in_eager(batch: torch.Tensor) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.spoil = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)), False

        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                x = layer(x)
                hidden = x.exp()
                x = hidden.sin()
                if self.spoil:
                    hidden.zero_()
            return x

    plain = Late()
    module = moving(plain, batch)
    loss(module(batch)).backward()  # type: ignore[no-untyped-call]
    module.zero_grad(set_to_none=True)
    for either in (plain, module):
        either.spoil = True
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss(either(batch)).backward()  # type: ignore[no-untyped-call]


def test_plans_are_saved_applied_and_cached(
    mlp: nn.Module, batch: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("REMATCH_PLAN_CACHE")
    plan = rematch.plans_of(moving(mlp, batch, budget="60%"))[-1]
    again = moving(mlp, batch, budget="60%")
    (known,) = rematch.plans_of(again)
    assert known.schedule == plan.schedule and any("cache of an earlier start" in note for note in known.notes)
    assert_trains_alike(again, copy.deepcopy(mlp), batch, loss)
    plan.save(tmp_path / "plan.json")
    applied = rematch.apply(copy.deepcopy(mlp), tmp_path / "plan.json", batch, loss=loss)
    assert_trains_alike(applied, mlp, batch, loss)
    assert host_of(applied).taken_bytes > 0
    assert runner_of(copy.deepcopy(applied)).host is None  # type: ignore[union-attr]


def test_is_refused_in_words_where_it_cannot_be(mlp: nn.Module, batch: torch.Tensor) -> None:
    for options, words in (
        ({"offload": "80%"}, "is a share"),
        ({"offload": "1GiB", "engine": "compiled"}, "offload= needs engine='tape' or 'replay'"),
        ({"offload": "1GiB", "recompute": ["*.norm"]}, "offload= cannot be given with it"),
    ):
        with pytest.raises(RematchError, match=words):
            rematch.remat(mlp, batch, budget="60%", **options)


def test_true_is_half_of_what_is_there(mlp: nn.Module, batch: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 2**31, "total": 2**32})())
    monkeypatch.setattr("rematch.planning.host._CONTAINER", Path("/nowhere"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    plan = rematch.plans_of(moving(mlp, batch, offload=True))[-1]
    assert any("up to 512 MiB of host memory" in note for note in plan.notes)
