"""Forward runs before autograd takes its notes, once for each call, and only where nothing comes in between."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rematch
from rematch.execute.replay import ahead as module_of_ahead
from rematch.execute.replay.ahead import Ahead, arguments_of_others
from rematch.execute.replay.engine import _that_count
from rematch.execute.replay.stretches import Call
from tests.modules import Net, batch, mean_square
from tests.training import assert_same_steps, step_of, train


def _counted() -> tuple[Ahead, list[list[Any]]]:
    calls: list[list[Any]] = []

    def forward(args: list[Any]) -> tuple[Any, ...]:
        calls.append(list(args))
        args.clear()
        return (len(calls),)

    return Ahead(forward, [1]), calls


def test_what_has_run_is_not_run_again() -> None:
    ahead, calls = _counted()
    args: list[Any] = [torch.ones(1), torch.ones(1, requires_grad=True)]
    ahead.run(args)
    assert not calls, "AOTAutograd looks on in the first call"
    assert ahead(list(args)) == (1,)
    ahead.run(args)
    assert len(calls) == 2 and calls[1][0] is args[0]
    assert not calls[1][1].requires_grad and calls[1][1].data_ptr() == args[1].data_ptr()
    given = list(args)
    assert ahead(given) == (2,) and given == []
    assert ahead(list(args)) == (3,)


def test_a_call_that_fails_leaves_nothing_to_the_next_one() -> None:
    ahead, _ = _counted()
    args = [torch.ones(1), torch.ones(1)]
    ahead(list(args))
    ahead.run(args)
    ahead.forget()
    assert ahead(list(args)) == (3,)


def test_forward_comes_before_the_nodes_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    run, handed = Ahead.run, Call.handed
    monkeypatch.setattr("rematch.capture.joint.read.STRETCH_BYTES", 1000)
    monkeypatch.setattr(Ahead, "run", lambda self, args: [run(self, args), happened.append("forward")][0])
    monkeypatch.setattr(Call, "handed", lambda self, args: [handed(self, args), happened.append("nodes")][0])
    plain = Net()
    module = rematch.remat(
        copy.deepcopy(plain), batch(), loss=mean_square, budget="90%", engine="replay", time_limit=0.3, cache=False
    )
    step = step_of(batch(), mean_square)
    assert_same_steps(train(module, step), train(plain, step))
    assert happened == ["forward", "nodes"] * 3


class _Keeps(nn.Module):
    """Has buffers that take over what forward is given; `shown` says how an argument is returned."""

    def __init__(self, shown: str) -> None:
        super().__init__()
        self.shown = shown
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("weight", torch.zeros(32, 32))
        self.register_buffer("seen", torch.zeros(16, 32))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.weight.copy_(self.last.weight)
            self.seen.copy_(x)
        logits = self.last(self.first(x).tanh())
        if self.shown == "as it is":
            return logits, x
        if self.shown == "as a view":
            return logits, self.last.weight.t(), logits.flatten()
        return logits, x.detach().exp()


@pytest.mark.parametrize("shown", ["as it is", "as a view", "computed"])
@pytest.mark.parametrize("stretch_bytes", [1 << 20, 1000], ids=["at once", "in stretches"])
def test_arguments_among_the_results(shown: str, stretch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rematch.capture.joint.read.STRETCH_BYTES", stretch_bytes)
    ran: list[Ahead] = []
    run = Ahead.run
    monkeypatch.setattr(Ahead, "run", lambda self, args: [ran.append(self), run(self, args)][1])
    torch.manual_seed(0)
    plain = _Keeps(shown)
    sample = torch.randn(16, 32)
    module = rematch.remat(
        copy.deepcopy(plain),
        sample,
        loss=lambda outputs: mean_square(outputs[0]),
        budget="1MiB",
        engine="replay",
        cache=False,
    )

    def step(each: nn.Module) -> Any:
        start = sample.clone().requires_grad_()
        outputs = each(start * 2)
        mean_square(outputs[0]).backward()
        return start.grad, *(output.detach() for output in outputs)

    assert_same_steps(train(module, step), train(plain, step))
    assert all(parameter.is_leaf for parameter in module.parameters())
    assert bool(ran) is (shown != "as a view"), "Dynamo itself returns an argument, and AOTAutograd makes a view anew"


def test_what_others_computed_is_not_held_by_what_forward_saves() -> None:
    """A loss that is kept must not keep the graph of an argument that gets no gradient."""
    infos = [SimpleNamespace(requires_grad=grad, is_leaf=leaf) for grad in (True, False) for leaf in (True, False)]
    assert arguments_of_others(SimpleNamespace(input_info=infos)) == [1]


class _Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * scale.detach()


class _Holds(torch.autograd.Function):
    """Its node has an attribute, whose end tells that of the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        ctx.held = held
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, None


def test_the_graph_of_an_argument_without_a_gradient_ends_with_the_argument() -> None:
    def scale() -> tuple[torch.Tensor, weakref.ref[torch.Tensor]]:
        held = torch.ones(1)
        return _Holds.apply(torch.ones(128, 32, requires_grad=True), held), weakref.ref(held)

    module = rematch.remat(
        _Scales(), (batch(), scale()[0]), loss=mean_square, budget="1MiB", engine="replay", time_limit=0.3, cache=False
    )
    for _ in range(3):
        argument, held = scale()
        output = module(batch(), argument)
        del argument
        gc.collect()
        assert output.requires_grad and held() is None


@pytest.mark.parametrize("at", ["forward", "nodes"])
def test_what_a_failed_call_computed_is_let_go(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rematch.capture.joint.read.STRETCH_BYTES", 1000)
    used: set[Ahead] = set()
    run = Ahead.run
    monkeypatch.setattr(Ahead, "run", lambda self, args: [used.add(self), run(self, args)][1])
    plain = Net()
    module = rematch.remat(
        copy.deepcopy(plain), batch(), loss=mean_square, budget="90%", engine="replay", time_limit=0.3, cache=False
    )
    step = step_of(batch(), mean_square)
    assert_same_steps(train(module, step), train(plain, step))

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory is left")

    (ahead,) = used
    name = "forward" if at == "forward" else "handed"
    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(ahead if at == "forward" else Call, name, fail)
        module(batch())
    assert ahead._thread.results is None
    for each in (module, plain):
        each.load_state_dict(plain.state_dict())  # a step further in its running statistics, or not
    assert_same_steps(train(module, step), train(plain, step))


class _PreciseHead(nn.Module):
    """A head that stays in single precision under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x).tanh()
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float())


def test_autocast_does_not_come_upon_what_has_been_traced_under_it() -> None:
    plain = _PreciseHead()

    def step(module: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            value = mean_square(module(batch()))
        value.backward()
        return value

    with torch.autocast("cpu", torch.bfloat16):
        module = rematch.remat(
            copy.deepcopy(plain), batch(), loss=mean_square, budget="1MiB", engine="replay", time_limit=0.3, cache=False
        )
    assert_same_steps(train(module, step), train(plain, step))


def test_calls_of_several_threads_get_their_own_results() -> None:
    ahead, _ = _counted()
    args = [torch.ones(1), torch.ones(1)]
    ahead(list(args))
    ahead.run(args)
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(ahead(list(args))))
    other.start()
    other.join()
    assert found == [(3,)] and ahead(list(args)) == (2,)


def test_a_subclass_or_a_merged_argument_keeps_forward_from_running_ahead() -> None:
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("a", "b")]
    for place, node in enumerate(nodes):
        node.meta["desc"] = SimpleNamespace(idx=place)
    plain, shows = SimpleNamespace(num_outputs_aliased=0), SimpleNamespace(num_outputs_aliased=1)
    result = graph.call_function(torch.add, tuple(nodes))
    tells = module_of_ahead.hands_over_arguments
    assert tells(graph, [result], plain, 2)
    assert not tells(graph, [result], plain, 3)
    assert not tells(graph, [nodes[0]], plain, 2)
    assert not tells(graph, [result], shows, 2)
    nodes[1].meta["desc"] = SimpleNamespace(base="of a subclass")
    assert not tells(graph, [result], plain, 2)


def test_guards_on_hooks_with_keywords_go_only_where_there_are_no_hooks() -> None:
    empty, other = "EMPTY_NN_MODULE_HOOKS_DICT", "DICT_VERSION"
    guards = [
        SimpleNamespace(name="m._forward_hooks", guard_type=empty),
        SimpleNamespace(name="m._forward_hooks_with_kwargs", guard_type=empty),
        SimpleNamespace(name="n._forward_hooks", guard_type=other),
        SimpleNamespace(name="n._forward_hooks_with_kwargs", guard_type=empty),
        SimpleNamespace(name="m._forward_hooks", guard_type=other),
        SimpleNamespace(name="m._forward_hooks_with_kwargs", guard_type=other),
    ]
    assert _that_count(guards) == [True, False, True, True, True, True]


def test_a_hook_with_keywords_that_is_added_later_counts() -> None:
    plain = Net()
    module = rematch.remat(copy.deepcopy(plain), batch(), loss=mean_square, budget="80%", engine="replay", cache=False)
    step = step_of(batch(), mean_square)
    assert_same_steps(train(module, step), train(plain, step))
    for each in (module, plain):
        each.blocks[1].register_forward_pre_hook(
            lambda _, args, kwargs: ((args[0] * 2, *args[1:]), kwargs), with_kwargs=True
        )
    assert_same_steps(train(module, step), train(plain, step))
