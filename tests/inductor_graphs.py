"""Joint graphs as inductor's partitioner gets them, without compiling anything.

`joint, count = joint_graph(module, sample)`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch._inductor.config
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor.compile_fx import partition_fn
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.fx.graph import _BoxedCodeGen

import rematch.planning.compiled

Halves = tuple[GraphModule, GraphModule]


class Calling(CustomPartitionerFn):  # type: ignore[misc]
    """A partitioner that calls a function."""

    def __init__(self, function: Callable[..., Halves]) -> None:
        self.function = function

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Halves:
        return self.function(gm, joint_inputs, **kwargs)

    def uuid(self) -> None:
        return None


def run_partitioned(
    module: nn.Module, sample: torch.Tensor, partitioner: CustomPartitionerFn, *, dynamic: bool = False
) -> torch.Tensor:
    """The module's output, computed by the eager kernels of graphs that `partitioner` cuts."""
    with torch._inductor.config.patch(custom_partitioner_fn=partitioner):
        output: torch.Tensor = compiled_eagerly(module, dynamic=dynamic)(sample)
    return output


def _run_as_it_is(graph: GraphModule, _: Sequence[Any]) -> Any:
    """Like inductor's code, it takes a list and lets go of what it has read for the last time."""
    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()

    def run(args: list[Any]) -> Any:
        assert FakeTensor not in map(type, args), "inductor's kernels need tensors with memory"
        return graph.forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _backend() -> Any:
    return aot_autograd(
        fw_compiler=_run_as_it_is,
        bw_compiler=_run_as_it_is,
        partition_fn=_partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )


def compile_eagerly(
    module: GraphModule, example_inputs: Sequence[Any], config_patches: dict[str, Any]
) -> Callable[..., Any]:
    """In the place of inductor's `compile_fx`: all that it does but the compiling."""
    with torch._inductor.config.patch(config_patches):
        run: Callable[..., Any] = _backend()(module, example_inputs)
    return run


def use_eager_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have graphs run by eager kernels, and planned without what inductor would make of them."""

    def not_inductors(*_: Any, **__: Any) -> None:
        raise NotImplementedError("eager kernels run the graph")

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_eagerly)
    monkeypatch.setattr(rematch.planning.compiled, "lower_step", not_inductors)


def compiled_eagerly(module: nn.Module, *, dynamic: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """The module through Dynamo, AOTAutograd, inductor's passes and its partitioner, and no compiler."""
    compiled: Any = torch.compile(module, backend=_backend(), dynamic=dynamic)
    return compiled  # type: ignore[no-any-return]


def _partition(gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Halves:
    """Inductor's passes over the joint graph, then the partitioner it was told to call."""
    with V.set_fake_mode(TracingContext.get().fake_mode):
        halves: Halves = partition_fn(gm, joint_inputs, **kwargs)
    return halves


def joint_graph(module: nn.Module, sample: torch.Tensor) -> tuple[GraphModule, int]:
    """The joint graph after inductor's passes, and how many of its outputs are forward's."""
    found: list[tuple[GraphModule, int]] = []

    def note(gm: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Halves:
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)
        found.append((gm, num_fwd_outputs))
        return min_cut_rematerialization_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)

    run_partitioned(module, sample, Calling(note))
    return found[0]
