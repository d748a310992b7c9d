"""How calls find their way: plainly, on the tape or by replay; and what happens when they leave it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

import rematch
from rematch.capture.memory import PeakMemory
from rematch.errors import CaptureError
from rematch.execute import choice, runner
from rematch.execute.replay.engine import Replay
from tests.modules import BATCH, Net, batch, mean_square
from tests.training import assert_same_steps, step_of, train

REMAT: dict[str, Any] = {"budget": "70%", "time_limit": 0.5}
STEP = step_of(batch(), mean_square)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which engine each call takes; nothing for a call that runs plainly."""
    taken: list[str] = []
    run, call = runner.run, Replay.__call__

    def taped(*args: Any, **options: Any) -> Any:
        taken.append("tape" if options["plan"] is not None else "tape without a plan")
        return run(*args, **options)

    def replayed(self: Replay, *args: Any, **kwargs: Any) -> Any:
        if not self.dry:
            taken.append("replay")
        return call(self, *args, **kwargs)

    monkeypatch.setattr(runner, "run", taped)
    monkeypatch.setattr(Replay, "__call__", replayed)
    yield taken


def alike(wrapped: nn.Module, plain: nn.Module, steps: int = 2) -> None:
    assert_same_steps(train(wrapped, STEP, steps=steps), train(plain, STEP, steps=steps))


@pytest.mark.parametrize(
    ("engine", "budget", "expected"),
    [("tape", "100%", []), ("tape", "70%", ["tape"] * 2), ("replay", "70%", ["replay"] * 2), ("auto", "100%", [])],
)
def test_the_engine_that_is_asked_for_runs(engine: str, budget: str, expected: list[str], ways: list[str]) -> None:
    plain = Net()
    wrapped = rematch.remat(copy.deepcopy(plain), batch(), engine=engine, **{**REMAT, "budget": budget})
    alike(wrapped, plain)
    assert ways == expected
    assert all(plan.engine == expected[0] for plan in rematch.plans_of(wrapped) if expected)


def test_by_default_a_model_that_the_tape_would_slow_down_is_replayed(
    ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = {}
    for host_seconds in (0.0, 1e5):
        monkeypatch.setattr(choice, "_TAPE_HOST_COST", host_seconds)
        engines[host_seconds] = rematch.plan(Net(), batch(), loss=mean_square, **REMAT).engine
    assert engines == {0.0: "tape", 1e5: "replay"}
    unknown = rematch.plan(Net(), batch(), **REMAT)
    assert unknown.engine == "tape"
    assert "engine: tape, because replay takes gradients as the loss gives them; see loss=" in unknown.notes


def test_each_kind_of_call_has_a_plan_of_its_own(ways: list[str]) -> None:
    wrapped = rematch.remat(Net(), batch(), engine="tape", **REMAT)
    wrapped(batch())
    wrapped.eval()(batch())
    wrapped.train()(batch(16))
    wrapped(batch(), scale=1.0)
    wrapped(batch(), scale=torch.tensor(2.0))
    with torch.autocast("cpu", torch.bfloat16):
        wrapped(batch())
    plans = rematch.plans_of(wrapped)
    assert len(plans) == len({plan.graph_fingerprint for plan in plans}) == 5, "a default that is given is no new graph"


# The referee


class Sly(Net):
    """Does something else while torch.compile looks on, as transformers does."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if torch.compiler.is_compiling():
            x = x.cos()
        return super().forward(x, scale)


def test_a_trace_that_is_not_what_eager_runs_is_not_replayed(ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_TAPE_HOST_COST", 1e5)
    plain = Sly()
    with pytest.raises(CaptureError, match=r"not what eager runs: the trace has 1 x cos of \[\(128, 32\)\]"):
        rematch.remat(plain, batch(), engine="replay", **REMAT)
    wrapped = rematch.remat(copy.deepcopy(plain), batch(), loss=mean_square, **REMAT)
    alike(wrapped, plain)
    assert set(ways) == {"tape"}
    (note,) = [note for note in rematch.plans_of(wrapped)[0].notes if note.startswith("engine")]
    assert "tape, because forward asks whether torch.compile traces it" in note


class Slyer(Net):
    """Asks in a way that recording does not see."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x.cos() if torch.compiler.is_dynamo_compiling() else x, scale)


def test_replay_that_was_refused_once_is_not_tried_for_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_TAPE_HOST_COST", 1e5)
    wrapped = rematch.remat(Slyer(), batch(), loss=mean_square, **REMAT)
    monkeypatch.setattr(Replay, "prepare", None)
    wrapped(batch(BATCH - 8))
    for plan in rematch.plans_of(wrapped):
        (note,) = [note for note in plan.notes if note.startswith("engine")]
        assert "tape, because replay refused: what torch.compile traces is not what eager runs" in note


# Paths that part


class Winding(Net):
    """As many turns as somebody says."""

    turns = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for _ in range(self.turns):
            x = self.blocks[0](x).sin()
        return super().forward(x, scale)


def test_a_path_that_parts_from_its_plan_is_planned_for_the_next_call(ways: list[str]) -> None:
    plain = Winding()
    wrapped = rematch.remat(copy.deepcopy(plain), batch(), engine="tape", budget=450_000, time_limit=0.5)
    for turns in (0, 1, 0):
        wrapped.turns = plain.turns = turns
        alike(wrapped, plain, steps=3)
    fingerprints = {plan.graph_fingerprint for plan in rematch.plans_of(wrapped)}
    assert len(fingerprints) >= 2
    assert set(ways) == {"tape"}


def test_a_module_that_never_takes_its_path_again_is_followed_without_plans(
    ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(runner.log, "warning", lambda message, *args: said.append(message % args))
    plain = Winding(norm=False)
    wrapped = rematch.remat(copy.deepcopy(plain), batch(), engine="tape", budget="70%", time_limit=0.5)
    wrapped.eval()
    plain.eval()
    for turns in (1, 2, 3, 1, 2, 3, 1, 2, 3, 1):
        wrapped.turns = plain.turns = turns
        for module in (wrapped, plain):
            module.zero_grad()
            mean_square(module(batch())).backward()
        pairs = zip(wrapped.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    assert ways[-1] == "tape without a plan"
    assert len(said) == 1 and "takes other paths than its plans" in said[0]


class Pondering(Net):
    """As many turns as the data says."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for _ in range(int(x[0, 0].item())):
            x = self.blocks[0](x).sin()
        return super().forward(x, scale)


def _asking_for(turns: int) -> torch.Tensor:
    asking = batch()
    asking[0, 0] = turns
    return asking


def test_where_the_data_decides_a_plan_that_keeps_everything_is_watched_too(ways: list[str]) -> None:
    plain = Pondering()
    short, long = (_peak_bytes(plain, _asking_for(turns)) for turns in (0, 24))
    wrapped = rematch.remat(copy.deepcopy(plain), _asking_for(0), engine="tape", budget=short * 2, time_limit=0.5)
    assert not rematch.plans_of(wrapped)[0].recomputed
    peaks = [_peak_bytes(wrapped, _asking_for(24)) for _ in range(3)]
    assert set(ways) == {"tape"}
    assert peaks[-1] <= short * 2 < long


class Watched(Pondering):
    """Notes whether anybody watches where its last block begins."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[int] = []
        self.head.register_forward_pre_hook(lambda *_: self.modes.append(torch._C._len_torch_dispatch_stack()))


def test_nobody_watches_once_the_data_can_no_longer_decide() -> None:
    plain, watched = Pondering(), Watched()
    watched.load_state_dict(plain.state_dict())
    wrapped = rematch.remat(watched, _asking_for(0), engine="tape", budget="110%", time_limit=0.5)
    watched.modes.clear()
    for turns, expected in ((0, 1), (0, 0), (1, 1), (0, 1), (0, 0)):  # a first step is watched, and another path
        for module in (wrapped, plain):
            module.zero_grad(set_to_none=True)
            torch.manual_seed(turns)
            mean_square(module(_asking_for(turns))).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(wrapped.parameters(), plain.parameters(), strict=True))
        assert watched.modes.pop() == expected
        assert "forward" not in watched.blocks[0].__dict__


def _peak_bytes(module: nn.Module, sample: torch.Tensor) -> int:
    """The peak of a training step, with what is there before it."""
    module.zero_grad()
    before = sample.nbytes + sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    with PeakMemory(torch.device("cpu")) as used:
        mean_square(module(sample)).backward()
    return before + used.peak_bytes


# What replay reads


class Scaled(Net):
    factor = 1.0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x * self.factor, scale)


def test_what_replay_reads_is_guarded(ways: list[str]) -> None:
    plain = Scaled()
    wrapped = rematch.remat(copy.deepcopy(plain), batch(), engine="replay", **REMAT)
    for factor in (1.0, 2.0):
        wrapped.factor = plain.factor = factor
        alike(wrapped, plain)
    assert set(ways) == {"replay"}


def test_what_changes_in_every_call_is_left_to_the_tape(ways: list[str]) -> None:
    plain = Scaled()
    wrapped = rematch.remat(copy.deepcopy(plain), batch(), engine="replay", **REMAT)
    for number in range(6):
        wrapped.factor = plain.factor = 1.0 + number
        alike(wrapped, plain, steps=1)
    assert ways[-1] == "tape"
    *_, last = rematch.plans_of(wrapped)
    assert "engine: tape, because what forward reads changes from call to call" in last.notes


def test_a_measured_peak_above_the_budget_is_planned_for() -> None:
    plain = Net()
    model = rematch.remat(copy.deepcopy(plain), batch(), engine="tape", **REMAT)
    first = rematch.plans_of(model)[-1].figures
    asked_bytes = first.budget_bytes + 1024  # some of it the planner leaves to small things
    model.forward.peak_measured(asked_bytes)
    assert not any(route.stale for route in model.forward._routes.values())
    excess_bytes = asked_bytes // 20
    model.forward.peak_measured(asked_bytes + excess_bytes)
    alike(model, plain)
    assert rematch.plans_of(model)[-1].figures.budget_bytes == first.budget_bytes - excess_bytes


def test_blocks_are_captured_where_a_card_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.Runner, "_keeps_card_waiting", lambda self, route: route.tape is not None)
    plain = Net(norm=False)
    for block in plain.blocks:
        block.drop.p = 0.0  # type: ignore[union-attr]
    model = rematch.remat(copy.deepcopy(plain), batch(), engine="tape", **REMAT)
    alike(model, plain, steps=4)
    (blocks,) = (route.blocks for route in model.forward._routes.values() if route.blocks is not None)
    assert blocks.unseen > 0


class _Turning(Net):
    """Takes another path of the same length once it is told to."""

    turned = False

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = torch.sigmoid(x * scale) if self.turned else torch.tanh(x * scale)
        return super().forward(x)


def test_backward_of_a_path_that_left_its_plan_goes_by_demand() -> None:
    plain = _Turning(depth=6, norm=False)
    model = rematch.remat(copy.deepcopy(plain), batch(), engine="tape", budget="45%", time_limit=2.0)
    alike(model, plain)
    model.turned = plain.turned = True  # type: ignore[assignment]
    alike(model, plain)


@pytest.mark.parametrize("engine", ["tape", "replay", "blocks"])
def test_a_module_that_is_let_go_of_is_gone(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing outlives it but what the user holds: a loss still has its backward."""
    if engine == "blocks":
        monkeypatch.setattr(runner.Runner, "_keeps_card_waiting", lambda self, route: route.tape is not None)
    model = rematch.remat(Net(norm=False), batch(), engine="tape" if engine == "blocks" else engine, **REMAT)
    weight = next(model.parameters())
    for _ in range(4):
        STEP(model)
    loss = model(batch()).square().mean()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    weight.grad = None
    loss.backward()
    assert weight.grad is not None


@pytest.mark.parametrize("engine", ["tape", "replay"])
def test_a_loss_that_was_measured_leaves_no_profiler_behind(engine: str) -> None:
    """One that stays on the thread takes a later profiler of the user's for its own, and aborts the process."""
    model = rematch.remat(Net(), batch(), engine=engine, **REMAT)
    STEP(model)
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, False, False, False, False, _ExperimentalConfig()))
    torch.ones(3)
    events = [event for thread in _disable_profiler_legacy() for event in thread]
    assert sum(str(event.kind()) == "push" and event.name() == "aten::ones" for event in events) == 1
