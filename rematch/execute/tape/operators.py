"""What a tape has to know of an operator before it notes a call of it.

`operator_of(torch.ops.aten.relu_.default).written == 0`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from rematch.capture.aten import (
    BATCH_NORM_STATISTICS,
    PASS_THROUGH,
    adds_with_atomics,
    can_be_noted,
    is_constant,
    is_filling,
    is_of_torch,
)
from rematch.capture.traits import Family, traits_of

_EXPENSIVE = {Family.MATMUL, Family.CONVOLUTION, Family.ATTENTION, Family.RECURRENT, Family.FFT}


@dataclass(slots=True, eq=False)
class Operator:
    """See the module; made once for each overload."""

    call: Any
    run: Callable[..., Any]
    repeats: bool  # whether a call can be noted at all
    atomics_on_cuda: bool  # whether two runs there may differ in the last bit
    of_torch: bool  # custom operators have their writes counted before they run, others afterwards
    writes: bool  # whether it changes arguments, by its schema or not
    passes_through: bool  # makes no memory, so that plans do not count it: views, reads of values, marks for profilers
    reads: bool  # returns values of the data to Python
    places: tuple[int, ...]  # of arguments that may be or contain tensors
    written: int | None  # the place of the one argument that it changes, if that is positional,
    written_name: str | None  # or its name
    other_written: tuple[int, ...]  # places of arguments that it changes, if there are several, or none is returned
    fills: bool
    constant: bool
    draws: bool
    dropout: tuple[int, Any] | None  # place and default of the probability without which it does not draw
    statistics: tuple[tuple[int, ...], int] | None  # of a batch norm: its running statistics, and whether it trains
    expensive: bool

    def argument(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives for the argument at `place` of the schema; None for nothing."""
        if place < len(args):
            return args[place]
        return kwargs.get(self.call._schema.arguments[place].name)

    def draws_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments draws random numbers."""
        if not self.draws or self.dropout is None:
            return self.draws
        place, default = self.dropout
        given = args[place] if place < len(args) else kwargs.get("dropout_p", default)
        return bool(given != 0.0)


_KNOWN: dict[int, Operator] = {}  # by id, for overloads hash slowly; each entry keeps its overload alive


def operator_of(call: Any) -> Operator:
    """What is known of `call`, which is an overload or a higher-order operator."""
    found = _KNOWN.get(id(call))
    if found is None:
        found = _KNOWN[id(call)] = _describe(call) if isinstance(call, OpOverload) else _opaque(call)
    return found


def _opaque(call: Any) -> Operator:
    return Operator(
        call, call, False, False, False, False, False, False, (), None, None, (), False, False, False, None, None, True
    )


def _describe(call: OpOverload) -> Operator:
    schema = call._schema
    arguments = schema.arguments
    name = call.overloadpacket.__name__
    places = tuple(place for place, argument in enumerate(arguments) if "Tensor" in str(argument.type))
    written = [place for place in places if (info := arguments[place].alias_info) is not None and info.is_write]
    returned = schema.returns
    is_view = bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)
    makes_tensors = any("Tensor" in str(result.type) for result in returned)
    single = len(written) == 1 and len(returned) == 1 and "List" not in str(arguments[written[0]].type)
    single = single and returned[0].alias_info is not None and returned[0].alias_info.is_write
    keyword = single and arguments[written[0]].kwarg_only
    statistics = BATCH_NORM_STATISTICS.get(call)
    dropout = [place for place, argument in enumerate(arguments) if argument.name == "dropout_p"]
    known = can_be_noted(call)
    return Operator(
        call=call,
        run=call._op,
        repeats=known and makes_tensors and not is_view and (not written or single),
        atomics_on_cuda=adds_with_atomics(call),
        of_torch=is_of_torch(call),
        writes=bool(written) or statistics is not None,
        passes_through=(
            is_view or call in PASS_THROUGH or call.namespace == "profiler" or not (makes_tensors or written)
        ),
        reads=bool(returned) and not makes_tensors and call.namespace != "profiler",
        places=tuple(place for place in places if not arguments[place].kwarg_only),
        written=written[0] if single and not keyword else None,
        written_name=arguments[written[0]].name if keyword else None,
        other_written=() if single else tuple(written),
        fills=is_filling(call) or keyword,
        constant=is_constant(call),
        draws=torch.Tag.nondeterministic_seeded in call.tags,
        dropout=(dropout[0], arguments[dropout[0]].default_value) if dropout else None,
        statistics=statistics,
        expensive=traits_of(name).family in _EXPENSIVE,
    )
