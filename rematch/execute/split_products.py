"""Products whose two gradients are computed one by one, each when backward needs it.

`forward = with_split_products(model.forward)`

Autograd's node for `one * two` asks for both factors and makes both gradients at once: of a gated MLP, that is five
tensors of the width of its middle. Here each factor has a node of its own, which takes the gradient of the product and
runs right before the node that made the factor, so that the first gradient is used up before the second is made. All
nodes of the module itself run in the order in which they run without, and the kernels are the same: so are the bits.

Only what Python multiplies is split, and only plain products of two results that both need gradients. Under other
saved-tensor hooks nothing is: a region under `torch.utils.checkpoint` runs again in backward, as its own code has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.overrides import TorchFunctionMode

_PRODUCTS = {torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__}
_current_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]


def with_split_products(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with a node of autograd for each factor of its products."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _SplitProducts():
            return forward(*args, **kwargs)

    return run


class _SplitProducts(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.hooks = _current_hooks(True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling() and func in _PRODUCTS and not (types or kwargs) and len(args) == 2:
            splits = _can_be_split(*args) and _current_hooks(True) == self.hooks
            return _product(*args) if splits else func(*args)
        return func(*args, **(kwargs or {}))


def _can_be_split(one: Any, two: Any) -> bool:
    return (
        isinstance(one, Tensor)
        and isinstance(two, Tensor)
        and one is not two
        and one.grad_fn is not None
        and two.grad_fn is not None
        and one.shape == two.shape
        and one.dtype == two.dtype
        and one.is_floating_point()  # the gradients of complex ones take conjugates
        and torch.is_grad_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )


def _product(one: Tensor, two: Tensor) -> Tensor:
    # Not inside a function of autograd: what runs there cannot be recomputed.
    made = [one.detach() * two.detach()]
    product: Tensor = _Product.apply(made, _factor(one, two), _factor(two, one))  # type: ignore[no-untyped-call]
    return product


def _factor(factor: Tensor, other: Tensor) -> Tensor:
    # In a list, `other` is no argument to autograd: an edge to it would make its node wait for this one.
    made: Tensor = _Factor.apply(factor, [other])  # type: ignore[no-untyped-call]
    node: Any = made.grad_fn
    node._set_sequence_nr(factor.grad_fn._sequence_nr())  # type: ignore[union-attr]
    return made


class _Factor(Function):
    """A factor on its way into a product; what comes back is the product's gradient."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, other: list[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*other)
        return factor.view_as(factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:  # type: ignore[override]
        (other,) = ctx.saved_tensors
        return None if gradient is None else gradient * other, None


class _Product(Function):
    """What was computed already, as the product of two factors."""

    @staticmethod
    def forward(ctx: Any, made: list[Tensor], *_: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return made.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, Tensor | None, Tensor | None]:  # type: ignore[override]
        return None, gradient, gradient
