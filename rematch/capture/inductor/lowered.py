"""The halves of a step as inductor's own scheduler lays them out, without compiling a kernel.

`lower_step(forward, backward, returned=1).peaks(resident_bytes=0).peak_bytes(loss_bytes=0)`

Inductor lowers a graph, decides what is in memory, fuses operators into kernels and orders these for a small peak. We
have it do so on copies of the graphs and read its scheduler: which kernels there are, what each allocates, writes over
and reads for the last time. No code is written, compiled or run, so this takes a part of the time of a compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import torch
from torch._dynamo.utils import preserve_rng_state
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import IRNode, MultiOutput, MultiOutputLayout, NoneLayout, NonOwningLayout
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import _disable_current_modes

from rematch.capture.inductor.buffers import tensor_bytes
from rematch.capture.inductor.copies import copy_module, traced_name
from rematch.capture.inductor.peak import StepPeaks
from rematch.capture.joint.traced import is_tangent
from rematch.capture.memory import allocated_bytes
from rematch.capture.requests import Request, most_bytes

Workspace = Callable[["Kernel"], int]
_WORKSPACE, _LOSS = "a library's workspace", "the loss"


@dataclass(frozen=True)
class Kernel:
    """One kernel; memory goes by the names of buffers and inputs."""

    nodes: frozenset[str]  # of the graph, that it computes
    makes: frozenset[str]
    reads: frozenset[str]
    takes_over: dict[str, str]  # what it makes -> memory read for the last time, which is written over
    library: bool  # a product, a convolution or another kernel that inductor does not write itself


@dataclass(frozen=True)
class Lowered:
    """A graph as inductor runs it."""

    kernels: tuple[Kernel, ...]
    sizes: dict[str, int]  # of memory, in bytes
    made_by: dict[str, str]  # memory -> the node of the graph whose result is there
    results: tuple[str | None, ...]  # memory of what the graph returns
    strides: tuple[tuple[int, ...] | None, ...]  # of what the graph returns

    def renamed(self, names: dict[str, str]) -> Lowered:
        """The same with other names for some memory."""

        def new(name: str) -> str:
            return names.get(name, name)

        kernels = [
            replace(
                kernel,
                makes=frozenset(map(new, kernel.makes)),
                reads=frozenset(map(new, kernel.reads)),
                takes_over={new(made): new(old) for made, old in kernel.takes_over.items()},
            )
            for kernel in self.kernels
        ]
        return replace(
            self,
            kernels=tuple(kernels),
            sizes={new(name): size for name, size in self.sizes.items()},
            made_by={new(name): node for name, node in self.made_by.items()},
            results=tuple(None if name is None else new(name) for name in self.results),
        )

    def requests(self, held: dict[str, str], kept: set[str], workspace: Workspace) -> Iterator[Request]:
        """What is asked for and freed, kernel by kernel; memory in `kept` counts elsewhere.

        `held` is what is alive, by the name it was asked for with: kernels write into memory that others asked for.
        """
        final = {result for result in self.results if result is not None}
        last: dict[str, int] = {}
        for place, kernel in enumerate(self.kernels):
            last.update(dict.fromkeys((*kernel.reads, *kernel.makes), place))
        for name in [name for name in held if name not in last and name not in final | kept]:
            yield held.pop(name), None
        for place, kernel in enumerate(self.kernels):
            for name in sorted(kernel.makes - held.keys() - kept):
                old = kernel.takes_over.get(name, name)
                if old in held and old not in kept:
                    held[name] = held.pop(old)
                else:
                    held[name] = name
                    yield name, self.sizes[name]
            if size := workspace(kernel):
                yield _WORKSPACE, size
                yield _WORKSPACE, None
            for name in sorted((kernel.reads | kernel.makes) - kept - final):
                if last[name] == place and name in held:
                    yield held.pop(name), None


@dataclass(frozen=True)
class LoweredStep:
    """Both halves. `returned` memory of forward goes to the user, who holds it until backward has ended."""

    forward: Lowered
    backward: Lowered
    inputs: frozenset[str]
    returned: frozenset[str]
    tangents: dict[str, int]

    def peaks(self, *, resident_bytes: int, workspace: Workspace = lambda kernel: 0) -> StepPeaks:
        """The peaks of a step. `resident_bytes` are there all the time, inputs of forward among them."""
        sizes: dict[Hashable, int] = {}
        parts = (most_bytes(part, sizes) for part in self._parts(workspace))
        return StepPeaks(*(resident_bytes + most for most in parts))

    def requests(self, loss_bytes: int, workspace: Workspace = lambda kernel: 0) -> Iterator[Request]:
        """What a step asks for and frees, if the loss takes so much between the halves."""
        forward, between, backward = self._parts(workspace)
        yield from forward
        yield from between
        if loss_bytes:
            yield _LOSS, loss_bytes
            yield _LOSS, None
        yield from backward

    def _parts(self, workspace: Workspace) -> tuple[Iterator[Request], Iterator[Request], Iterator[Request]]:
        """The requests of forward, of the loss and of backward, to be gone through in this order."""
        held: dict[str, str] = {}
        inputs = set(self.inputs)

        def between() -> Iterator[Request]:
            held.update(zip(self.tangents, self.tangents, strict=True))
            yield from self.tangents.items()

        def backward() -> Iterator[Request]:
            for name in self.returned & held.keys():  # the user's
                del held[name]
            yield from self.backward.requests(held, inputs | self.returned, workspace)

        return self.forward.requests(held, inputs, workspace), between(), backward()


def lower_step(
    forward: GraphModule, backward: GraphModule, *, returned: int, dropped: Collection[int] = ()
) -> LoweredStep:
    """Both halves of a step; `returned` of forward's results go to the user, the others are saved for backward.

    Results at the places `dropped` are let go of before backward.
    """
    inputs = frozenset(node.name for node in forward.graph.find_nodes(op="placeholder"))
    ahead = _lower(forward, _values(forward), backward=False)
    given_out = {name for name in ahead.results[:returned] if name is not None} - inputs
    kept = [name for place, name in enumerate(ahead.results[:returned]) if place not in dropped]
    held = given_out & set(kept)
    place_of = {node.name: place for place, node in enumerate(_results(forward)) if isinstance(node, Node)}
    given = backward.graph.find_nodes(op="placeholder")
    saved: dict[str, str] = {}  # input of backward -> memory that forward left, which may be a copy of an input
    values = _values(backward)
    for number, node in enumerate(given):
        place = place_of.get(node.name)
        if place is not None and (memory := ahead.results[place]) is not None:
            saved[node.name] = memory
            values[number] = _restrided(values[number], ahead.strides[place])
    donated = [n for n, node in enumerate(given) if saved.get(node.name, "") not in {"", *inputs, *given_out}]
    back = _lower(backward, values, backward=True, donated=donated)
    own = {name: f"{name} of backward" for name in back.sizes if name not in saved}  # both halves count from buf0
    tangents = {own[node.name]: tensor_bytes(node) for node in given if is_tangent(node) and node.name in own}
    return LoweredStep(ahead, back.renamed({**own, **saved}), inputs, frozenset(held), tangents)


def _results(module: GraphModule) -> Sequence[Any]:
    (results,) = module.graph.output_node().args
    assert isinstance(results, (tuple, list))
    return results


def _values(module: GraphModule) -> list[Any]:
    return [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]


def _restrided(value: Any, strides: tuple[int, ...] | None) -> Any:
    """A saved tensor as forward leaves it: inductor may have chosen another order than was traced."""
    if strides is None or not isinstance(value, torch.Tensor) or value.stride() == strides:
        return value
    return value.as_strided(value.size(), strides)


def _lower(module: GraphModule, values: Sequence[Any], *, backward: bool, donated: Sequence[int] = ()) -> Lowered:
    """Have inductor lower and schedule a copy of the graph. `donated` inputs may be written over."""
    copied, _ = copy_module(module)
    fake_mode = detect_fake_mode(values)
    assert fake_mode is not None
    # Inductor may time kernels while it schedules, on real tensors: modes of whoever traces must not see them.
    with _disable_current_modes(), preserve_rng_state(), torch.no_grad(), DebugContext(), V.set_fake_mode(fake_mode):
        view_to_reshape(copied)
        fake_tensor_prop(copied, values)
        _recursive_post_grad_passes(copied, is_inference=False)
        graph = GraphLowering(
            copied, example_inputs=values, shape_env=fake_mode.shape_env, is_inference=False, is_backward=backward
        )
        graph.bw_donated_idxs = list(donated)
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
            graph.run(*values)
            graph.init_wrapper_code()
            graph._update_scheduler()
            return _Scheduled(graph).lowered()


class _Scheduled:
    """Inductor's scheduler, read."""

    def __init__(self, graph: GraphLowering) -> None:
        self.graph = graph
        self.scheduler = graph.scheduler
        self.final = set(graph.get_output_names())
        self.memory: dict[str, str] = {}  # buffer -> the buffer or input whose memory it is in
        self.sizes: dict[str, int] = {}
        self.made_by: dict[str, str] = {}

    def lowered(self) -> Lowered:
        for name, given in self.graph.graph_inputs.items():
            if isinstance(given, IRNode):
                self.sizes[name] = _bytes(given)
        for buffer in self.scheduler.name_to_buf.values():
            self._place(buffer)
        last_read = self._last_reads()
        kernels = [_merged(group) for group in self._calls(last_read)]
        results = self.graph.graph_outputs or []
        return Lowered(
            kernels=tuple(kernels),
            sizes=self.sizes,
            made_by=self.made_by,
            results=tuple(self._result(result) for result in results),
            strides=tuple(_strides(result) for result in results),
        )

    def _place(self, buffer: Any) -> None:
        name, node = buffer.get_name(), buffer.node
        shown = (*buffer.get_mutations(), *buffer.get_aliases())
        layout = node.layout
        if isinstance(layout, NonOwningLayout):  # part of a concatenation
            shown = (layout.view.data.get_name(), *shown)
        if shown:
            self.memory[name] = shown[0]
        elif not isinstance(layout, (NoneLayout, MultiOutputLayout)):
            self.sizes[name] = _bytes(node)
            origin = node.get_origin_node()
            if origin is not None:
                self.made_by[name] = traced_name(origin)

    def _root(self, name: str) -> str | None:
        """The memory that a buffer is in; None for one that has none of its own."""
        name = self.scheduler.mutation_real_name.get(name, name)
        while name in self.memory:
            name = self.memory[name]
        return name if name in self.sizes else None

    def _result(self, result: Any) -> str | None:
        if not isinstance(result, IRNode) or not result.has_tensor_output():
            return None
        return self._root(result.get_name())

    def _removed(self, buffer: Any, operations: OrderedSet[str]) -> bool:
        """Whether only the kernel itself reads the buffer, which then is in registers."""
        name = buffer.get_name()
        return (
            name not in self.final
            and name in self.sizes
            and self.scheduler.can_buffer_be_removed_through_fusion(name, operations)
        )

    def _calls(self, last_read: dict[str, Any]) -> Iterator[list[Kernel]]:
        """Kernels that one call runs: on the CPU all loops between two library kernels, whose memory is freed after."""
        group: list[Kernel] = []
        for node in self.scheduler.nodes:
            device = node.get_device()
            stays = device is not None and device.type == "cpu" and not node.is_extern() and not node.is_template()
            if group and not stays:
                yield group
                group = []
            group.append(self._kernel(node, last_read))
            if not stays:
                yield group
                group = []
        if group:
            yield group

    def _last_reads(self) -> dict[str, Any]:
        """For each memory the operation that reads it last."""
        last: dict[str, Any] = {}
        for node in self.scheduler.nodes:
            for inner in node.get_nodes():
                last.update(dict.fromkeys(self._read_by(inner), inner))
        return last

    def _read_by(self, node: Any) -> set[str]:
        roots = (self._root(read.name) for read in node.read_writes.reads)
        return {root for root in roots if root is not None}

    def _kernel(self, node: Any, last_read: dict[str, Any]) -> Kernel:
        inside = node.get_nodes()
        library = not any(hasattr(inner, "_body") for inner in inside)
        operations = OrderedSet(inner.get_name() for inner in inside)
        removed = {
            buffer.get_name()
            for inner in inside
            for buffer in inner.get_outputs()
            if not library and self._removed(buffer, operations)
        }
        makes: set[str] = set()
        takes_over: dict[str, str] = {}
        for inner in inside:
            for buffer in self._outputs(inner):
                root = self._root(buffer.get_name())
                if root is None or root in removed:
                    continue
                makes.add(root)
                old = None if library or root != buffer.get_name() else self._written_over(inner, root, last_read)
                if old is not None and old not in takes_over.values() and old not in removed:
                    takes_over[root] = old
        reads = {root for inner in inside for root in self._read_by(inner)} - removed
        # To take one of several results is no computation: it needs no workspace, which goes by these nodes.
        computed = [inner.node for inner in inside if not isinstance(inner.node, (MultiOutput, NoneType))]
        nodes = {traced_name(origin) for node in computed for origin in node.get_origins()}
        return Kernel(frozenset(nodes), frozenset(makes), frozenset(reads), takes_over, library)

    def _outputs(self, inner: Any) -> list[Any]:
        """What an operation makes; one of several results makes them all at once."""
        found = []
        for buffer in inner.get_outputs():
            found.append(buffer)
            if isinstance(buffer.node.layout, MultiOutputLayout):
                users = [user.node for user in buffer.users if hasattr(user.node, "get_outputs")]
                parts = [part for user in users for part in user.get_outputs()]
                found += [part for part in parts if isinstance(part.node, MultiOutput)]
        return found

    def _written_over(self, inner: Any, made: str, last_read: dict[str, Any]) -> str | None:
        """Memory of the same kind that an operation reads for the last time, element by element as it writes."""
        for read in inner.read_writes.reads:
            old = self._root(read.name)
            known = self.scheduler.name_to_donated_buffer.get(read.name) or self.scheduler.name_to_buf.get(read.name)
            if old is None or known is None or old in self.final or last_read[old] is not inner:
                continue
            if read.name in self.memory:  # inductor leaves alone what was changed in place, as by a scatter
                continue
            uses = [user for user in known.users if user.node is inner]
            fits = self.sizes[old] == self.sizes[made] and self._accessed_in_one_way(known, inner)
            if uses and all(user.can_inplace for user in uses) and fits:
                return old
        return None

    def _accessed_in_one_way(self, buffer: Any, inner: Any) -> bool:
        """Whether all of the kernel that `inner` is in goes through the buffer in the same order."""
        fused = self.scheduler.name_to_fused_node
        kernel = fused[inner.get_first_name()]
        accesses = set()
        for user in buffer.users:
            node = user.node  # of an operation that inductor may have dropped, as nobody needs its result
            if hasattr(node, "read_writes") and fused.get(node.get_first_name()) is kernel:
                accesses |= {each for each in node.read_writes.reads_and_writes() if each.name == buffer.get_name()}
        return len(accesses) <= 1


def _merged(kernels: Sequence[Kernel]) -> Kernel:
    if len(kernels) == 1:
        return kernels[0]
    return Kernel(
        nodes=frozenset().union(*(kernel.nodes for kernel in kernels)),
        makes=frozenset().union(*(kernel.makes for kernel in kernels)),
        reads=frozenset().union(*(kernel.reads for kernel in kernels)),
        takes_over={made: old for kernel in kernels for made, old in kernel.takes_over.items()},
        library=all(kernel.library for kernel in kernels),
    )


def _bytes(node: Any) -> int:
    layout = node.get_layout()
    reach = 1 + sum((int(size) - 1) * int(stride) for size, stride in zip(layout.size, layout.stride, strict=True))
    empty = any(int(size) == 0 for size in layout.size)
    device = node.get_device()
    return allocated_bytes(0 if empty else reach * layout.dtype.itemsize, device)


def _strides(result: Any) -> tuple[int, ...] | None:
    if not isinstance(result, IRNode) or not result.has_tensor_output():
        return None
    return tuple(int(stride) for stride in result.get_layout().stride)
