from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from rematch.execute.replay.bindings import binding_of

aten = torch.ops.aten


def node_of(target: Any, *args: Any, **kwargs: Any) -> Node:
    """A node that calls `target`; lists of sizes in braces stand for tensors: `{(2, 3)}`."""
    graph, mode = Graph(), FakeTensorMode()

    def placeholder(shape: tuple[int, ...]) -> Node:
        made = graph.placeholder(f"x{len(graph.nodes)}")
        with mode:
            made.meta["val"] = torch.empty(shape)
        return made

    shown = [placeholder(next(iter(arg))) if isinstance(arg, set) else arg for arg in args]
    node = graph.call_function(target, tuple(shown), kwargs)
    fakes = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in shown]
    with mode:
        node.meta["val"] = target(*fakes, **kwargs)
    return node


@pytest.mark.parametrize(
    ("target", "args", "binding"),
    [
        (aten.addmm.default, ({(3,)}, {(2, 4)}, {(4, 3)}), torch.addmm),
        (aten.mul.Tensor, ({(2, 4)}, {(2, 4)}), torch.mul),
        (aten.sum.dim_IntList, ({(2, 4)}, [0], True), torch.sum),
        (aten.native_layer_norm.default, ({(2, 4)}, [4], {(4,)}, {(4,)}, 1e-5), torch.native_layer_norm),
        (aten.gelu.default, ({(2, 4)},), torch._C._nn.gelu),
        (aten.bernoulli_.float, ({(2, 4)}, 0.9), torch._C.TensorBase.bernoulli_),
    ],
)
def test_the_generated_binding_is_found(target: Any, args: tuple[Any, ...], binding: Any) -> None:
    assert binding_of(node_of(target, *args)) is binding


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.mul.Scalar, ({(2, 4)}, 0.5)),  # torch.mul would wrap the number as a tensor: another overload
        (aten.native_layer_norm_backward.default, None),  # has no binding
        (torch.add, ({(2, 4)}, {(2, 4)})),  # is no operator of the dispatcher
    ],
)
def test_no_binding_is_used_that_makes_another_call(target: Any, args: tuple[Any, ...] | None) -> None:
    if args is None:
        args = ({(2, 4)}, {(2, 4)}, [4], {(2, 1)}, {(2, 1)}, {(4,)}, {(4,)}, [True, True, True])
    assert binding_of(node_of(target, *args)) is None


def test_the_try_computes_nothing() -> None:
    values = torch.ones(2, 4)
    node = node_of(aten.bernoulli_.float, {(2, 4)}, 0.9)
    node.args[0].meta["val"] = values  # type: ignore[union-attr]
    node.meta["val"] = values
    state = torch.get_rng_state()
    assert binding_of(node) is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(values, torch.ones(2, 4))
