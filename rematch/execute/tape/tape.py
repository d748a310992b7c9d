"""The dispatch mode that follows forward and the hooks that see what autograd saves.

`with Tape(plan, budget) as tape, saved_tensors_hooks(tape.pack, unpack): forward()`

The mode sees every operator below autograd and autocast. It compares each with the plan, runs it, and notes those that
the plan names. Arguments are known by storage and version, and never by what the plan expects, so that another data
flow than the planned one is noted right as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from rematch.capture.aten import aten, without_running_statistics
from rematch.execute.tape.contents import (
    Content,
    Handle,
    Note,
    Ref,
    Saved,
    layout_of,
    let_go_of_memory,
    modified_in_place,
    storage_address,
)
from rematch.execute.tape.draws import Draw
from rematch.execute.tape.dynamo import KEEPS_DYNAMO_OUT, keep_dynamo_out
from rematch.execute.tape.eviction import KeptForGood, Ledger
from rematch.execute.tape.operators import Operator, operator_of
from rematch.execute.tape.plan import Budget, ContentKey, Parting, TapePlan
from rematch.execute.tape.recompute import Backward
from rematch.execute.tape.storages import CHANGING, Storages
from rematch.execute.tape.threads import not_forward, thread
from rematch.execute.transfers import HostMemory

_DETACH = aten.detach.default
_COUNTS_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
SMALL_BYTES = 2**16  # what may be held, or computed again, for convenience
_PRODUCT_COST = 32  # times the bytes that a product touches stands in for its time, where nobody knows better


class _Opaque(Exception):
    """A call that we do not note: its results are held where a note reads them."""


class Tape(TorchDispatchMode):
    """See the module; one for each call of forward."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A submodule under torch.compile is compiled as ever, and its inside is none of our business."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap our method, in order that Dynamo stays out of it; `keep_dynamo_out` does so for nothing."""
        return not KEEPS_DYNAMO_OUT

    def __init__(self, plan: TapePlan | None, budget: Budget | None, host: HostMemory | None = None) -> None:
        super().__init__()
        self.plan = plan
        self.host = host
        self.steps = () if plan is None else plan.steps
        self.planned = len(self.steps)  # calls for which the plan holds
        self.dropped: frozenset[ContentKey] | None = None if plan is None else plan.dropped  # None: what has a note
        self.dropped_later: frozenset[ContentKey] = frozenset() if plan is None else plan.dropped_later
        self.position = 0
        self.watching = ExitStack()  # what is undone as the tape stops watching: at the end of forward, or before
        self.has_left = False
        self.readings: list[str] = []  # values that Python has read so far
        self.parting: int | None = None
        self.later: list[Any] = []  # calls after the plan
        self.budget = budget
        self.ledger: Ledger | None = None
        self.keeps_everything = False
        self.counted: set[int] = set()  # storages of contents that are kept for good
        self.inside_others = torch._C._len_torch_dispatch_stack() > 0
        self.stream = current_stream()
        self.storages = Storages()
        self.read: list[int] = []  # storages of the arguments of the call that is being noted
        self.watched_notes: list[Note] | None = None  # where somebody collects them, of all calls
        self.outer = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
        self.backward = Backward(plan, None)
        if plan is None:
            self._leave_plan()

    # What forward runs.

    @keep_dynamo_out
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DETACH:
            return func._op(*args)
        if thread.not_forward:
            return func(*args, **(kwargs or {}))
        position = self.position
        if position < self.planned:
            step = self.steps[position]
            if step.call is func:
                self.position = position + 1
                operator = step.operator
                if step.leaving:
                    self.let_go(step.leaving)
                if operator is None:
                    if self.watched_notes is not None:
                        return self._run_watched(operator_of(func), args, kwargs or {}, position)
                    return step.run(*args, **kwargs) if kwargs else step.run(*args)
                if not step.noted:
                    returned = self._run_opaque(operator, args, kwargs or {})
                    if step.rewritten and isinstance(returned, Tensor):
                        self.storages.made(returned)
                    if step.moved:
                        self._know_moved(position, step.moved, operator, returned)
                    return returned
                returned = self._run_noted(operator, args, kwargs or {}, position)
                if step.moved:
                    self._know_moved(position, step.moved, operator, returned)
                if step.shape is not None and not _has_shape(returned, step.shape):
                    self._leave_plan()
                return returned
        operator = operator_of(func)
        kwargs = kwargs or {}
        if operator.passes_through:
            returned = operator.run(*args, **kwargs)
            if operator.reads:
                self.readings.append(repr(returned))
            return returned
        if self.parting is None:
            self._leave_plan()
        self.position = position + 1
        self.later.append(func)
        if self.ledger is not None and operator.repeats:
            return self._run_noted(operator, args, kwargs, position)
        if operator.writes:
            return self._run_writing(operator, args, kwargs)
        return operator.run(*args, **kwargs)

    def _leave_plan(self) -> None:
        """Forward does what the plan does not know: from here on keep everything, or go by the budget."""
        self.parting = self.position
        self.planned = 0
        if self.budget is None:
            self.keeps_everything = True
        else:
            self.ledger = self.backward.ledger = Ledger(self.budget)
            self.dropped = None

    def _run_writing(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Run a call that we do not note, but that changes something we may know."""
        for written in _written_by(operator, args, kwargs):
            self.storages.before_write(written, counted=0 if operator.of_torch else 1)
            if not written.requires_grad and not self.storages.is_of_this_forward(written):
                CHANGING.add(written)
        returned = operator.run(*args, **kwargs)
        for written in _written_by(operator, args, kwargs):
            self.storages.forget(written)
        return returned

    def _run_noted(self, operator: Operator, args: Any, kwargs: Any, position: int) -> Any:
        if not torch.is_grad_enabled():  # inside custom functions, whose kernels may do what no dispatcher sees
            return self._run_opaque(operator, args, kwargs)
        if self.stream != current_stream():  # memory of another stream that we dropped could be reused too early
            return self._run_opaque(operator, args, kwargs)
        try:
            note, written = self._note(operator, args, kwargs, position)
        except (_Opaque, RuntimeError):  # a layout without a storage, a tensor without a version
            return self._run_opaque(operator, args, kwargs)
        if operator.statistics is not None:
            for changed in _written_by(operator, args, kwargs):
                self.storages.before_write(changed)
                CHANGING.add(changed)
        returned = operator.run(*args, **kwargs)
        if written is None:
            self._note_results(note, operator, returned)
        else:
            self._note_write(note, written)
        if self.watched_notes is not None:
            self.watched_notes.append(note)
        if self.backward.plan is not None and (self.plan is None or position in self.plan.noted):
            self.backward.expect(note)
        return returned

    def _run_watched(self, operator: Operator, args: Any, kwargs: Any, position: int) -> Any:
        """Run a call that the plan does not name, for somebody who wants a note of it if that keeps little memory."""
        if operator.repeats and all(map(self._is_light, (*args, *kwargs.values()))):
            return self._run_noted(operator, args, kwargs, position)
        return self._run_opaque(operator, args, kwargs)

    def _is_light(self, argument: Any) -> bool:
        """Whether a note may refer to it, and so hold it, for little memory more."""
        if isinstance(argument, (list, tuple)):
            return all(map(self._is_light, argument))
        if not isinstance(argument, Tensor) or not _has_storage(argument):
            return True
        if argument.untyped_storage().nbytes() <= SMALL_BYTES or (argument.is_leaf and argument.requires_grad):
            return True
        address = storage_address(argument)
        unknown = self.storages.unknown.get(address)
        known = (self.storages.noted.get(address), None if unknown is None else unknown())
        return any(content is not None and content.held is not None for content in known)

    def _run_opaque(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        if operator.writes:
            return self._run_writing(operator, args, kwargs)
        return operator.run(*args, **kwargs)

    # Notes.

    def _note(self, operator: Operator, args: Any, kwargs: Any, position: int) -> tuple[Note, Tensor | None]:
        """The note of a call that is about to run, and the tensor that it will write to."""
        if operator.statistics is not None:
            args = _for_repetition(operator, args)
        noted = list(args)
        self.read.clear()
        written: Tensor | None = None
        for place in operator.places:
            if place >= len(args):
                break
            argument = args[place]
            kind = type(argument)
            if kind is Tensor or kind is Parameter:
                if place == operator.written:
                    written = argument
                else:
                    noted[place] = self._ref(argument)
            elif kind is list or kind is tuple:
                noted[place] = [self._ref(entry) if isinstance(entry, Tensor) else entry for entry in argument]
            elif isinstance(argument, Tensor):
                raise _Opaque
        if kwargs:
            if operator.written_name is not None:
                written = kwargs[operator.written_name]
            kwargs = {
                name: self._ref(value) if isinstance(value, Tensor) and value is not written else value
                for name, value in kwargs.items()
            }
        if operator.atomics_on_cuda and not torch.are_deterministic_algorithms_enabled() and _on_cuda(args):
            raise _Opaque
        note = Note(operator, (), kwargs, position)
        if operator.draws and operator.draws_with(args, kwargs):
            note.draw = Draw.before(args, kwargs)
            if note.draw is None:
                raise _Opaque
        if written is not None:
            note.target = self._target(note, operator, written)
            if operator.written is not None:
                noted[operator.written] = note.target
            elif operator.written_name is not None:
                note.kwargs[operator.written_name] = note.target
        note.args = tuple(noted)
        if self.ledger is not None:
            note.cost = self._cost(operator, args, kwargs)
        return note, written

    def _ref(self, tensor: Tensor) -> Ref:
        """An argument as notes refer to it."""
        content = self.content_of(tensor)
        return Ref(content, None if content.held is tensor else layout_of(tensor), tensor.requires_grad)

    def content_of(self, tensor: Tensor) -> Content:
        """What a note that reads `tensor` refers to; it is held unless it is dropped."""
        address = storage_address(tensor)
        version = tensor._version
        self.read.append(address)
        content = self.storages.noted.get(address)
        if content is not None and content.version == version:
            kept = content.constant or content.dropped_later or not content.dropped
            if content.held is None and (kept or (content.moved and content.copy is None)):
                content.hold(self._alias(tensor), version, address)
            return content
        found = self.storages.unknown.get(address)
        content = None if found is None else found()
        if content is None or content.version != version:
            content = self._unknown(tensor, version, address)
        return content

    def _unknown(self, tensor: Tensor, version: int, address: int) -> Content:
        """The content of a storage that no noted call wrote."""
        if tensor.is_quantized or (type(tensor) is not Tensor and type(tensor) is not Parameter):
            raise _Opaque
        content = Content(None, 0, version, False)
        base = tensor._base
        if base is None:
            base = tensor
        if base.is_leaf and base.requires_grad:
            content.hold(base, version, address)  # no graph hangs on it, and none can be hung on it
        elif address in CHANGING:
            content.hold_copy(tensor)
        else:
            content.hold(self._alias(tensor), version, address)
        self.storages.unknown[address] = weakref.ref(content)
        return content

    def _alias(self, tensor: Tensor) -> Tensor:
        """Without the graph, with autograd's version counter, whose keys are switched off inside a mode."""
        with torch._C._SetExcludeDispatchKeyGuard(_COUNTS_VERSIONS, False):
            if not self.inside_others:
                return tensor.detach()
            with torch._C._DisableTorchDispatch():
                return tensor.detach()

    def _target(self, note: Note, operator: Operator, written: Tensor) -> Ref:
        """What an in-place call writes over."""
        address = storage_address(written)
        current = self.storages.noted.get(address)
        if operator.fills and _covers_storage(written):
            note.memory = written.untyped_storage().nbytes(), written.device
            current = Content(None, 0, 0, False)
        elif current is None or current.version != written._version:
            raise _Opaque
        self.storages.before_write(written)
        return Ref(current, layout_of(written), written.requires_grad)

    def _note_results(self, note: Note, operator: Operator, returned: Any) -> None:
        dropped = self.dropped
        for index, result in enumerate(returned if isinstance(returned, (tuple, list)) else (returned,)):
            if type(result) is not Tensor or result.layout is not torch.strided or result.is_quantized:
                continue
            storage = result.untyped_storage()
            address = storage._cdata
            known = self.storages.noted.get(address)
            if address in self.read or (known is not None and known.note is note):
                continue  # a view of an argument, or of a result before
            content = Content(note, index, result._version, dropped is None or (note.position, index) in dropped)
            content.constant = operator.constant
            content.dropped_later = (note.position, index) in self.dropped_later
            self.storages.put(storage, address, content)
            note.outputs.append((index, weakref.ref(content)))

    def _note_write(self, note: Note, written: Tensor) -> None:
        """After an in-place call; autograd counts the write once we return."""
        dropped = self.dropped is None or (note.position, 0) in self.dropped
        content = Content(note, 0, written._version + 1, dropped)
        content.dropped_later = (note.position, 0) in self.dropped_later
        storage = written.untyped_storage()
        self.storages.put(storage, storage._cdata, content)
        note.outputs.append((0, weakref.ref(content)))

    def _cost(self, operator: Operator, args: Any, kwargs: Any) -> float:
        assert self.budget is not None
        if self.budget.seconds is not None:
            return self.budget.seconds(operator.call, args, kwargs)
        touched = sum(argument.nbytes for argument in args if isinstance(argument, Tensor))
        return touched * (_PRODUCT_COST if operator.expensive else 1)

    # What autograd saves.

    @keep_dynamo_out
    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps of `tensor`; never a tensor with a graph, for that graph keeps what we return."""
        kind = type(tensor)
        if kind is Tensor:
            version = tensor._version
            try:
                content = self.storages.noted.get(storage_address(tensor))
            except RuntimeError:  # a layout without a storage
                content = None
            if (
                content is not None
                and content.dropped
                and content.version == version
                and not content.constant
                and not self.keeps_everything
                and (content.note is not None or self.parting is None)
            ):
                return self.handle(tensor, content, version)
        if self.outer is not None:
            pack, unpack = self.outer
            with not_forward():
                return _ByOthers(pack(tensor), unpack)
        if tensor.requires_grad and tensor.is_leaf:
            return tensor, tensor._version
        if kind is Tensor and self.ledger is None:
            return _alias(tensor), version
        return self._keep(tensor, plain=kind is Tensor)

    def handle(self, tensor: Tensor, content: Content, version: int) -> Handle:
        """What autograd keeps of a tensor that shows a dropped content."""
        saved = None if content.saved is None else content.saved()
        if saved is None:
            saved = Saved(content, _alias(tensor), version)
            content.saved = weakref.ref(saved)
            let_go_of_memory(saved.witness)
            if (content.dropped_later or content.moved) and content.held is None:
                content.hold(_alias(tensor), version, storage_address(tensor))
            if content.moved and content.copy is None:
                self._send(tensor, content)
            if self.ledger is not None:
                saved.size_bytes = tensor.untyped_storage().nbytes()
                saved.put(_alias(tensor))
                self.ledger.keep(saved)
        return Handle(saved, layout_of(tensor), self.backward)

    # What goes to host memory.

    def _know_moved(self, position: int, moved: tuple[int, ...], operator: Operator, returned: Any) -> None:
        """Have `pack` know the results that are to go to host memory, whether a note makes them or not."""
        results = returned if isinstance(returned, (tuple, list)) else (returned,)
        writes = operator.written is not None or operator.written_name is not None
        for index in moved:
            result = results[index]
            if type(result) is not Tensor or result.layout is not torch.strided or result.is_quantized:
                continue
            storage = result.untyped_storage()
            version = result._version + 1 if writes else result._version  # autograd counts a write once we return
            content = self.storages.noted.get(storage._cdata)
            if content is None or content.version != version:
                content = Content(None, index, version, True)
                content.position = position
                self.storages.put(storage, storage._cdata, content)
            content.moved = True
            self.backward.contents[content.key] = weakref.ref(content)

    def _send(self, tensor: Tensor, content: Content) -> None:
        """Begin the copy out; where there is no room for it, the content stays."""
        if self.host is not None:
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                content.copy = self.host.transfers(tensor.device).send(tensor)

    def let_go(self, leaving: Iterable[ContentKey]) -> None:
        """The plan needs the memory of what has been copied out."""
        for key in leaving:
            content = self.backward.content(key)
            if content is not None and content.copy is not None:
                content.let_go()

    def _keep(self, tensor: Tensor, plain: bool) -> Any:
        if not plain:
            with torch._C.DisableTorchFunctionSubclass():
                return tensor.detach(), tensor._version
        kept = _alias(tensor), tensor._version
        base = tensor if tensor._base is None else tensor._base
        if self.ledger is None or base.is_leaf or tensor.layout is not torch.strided:
            return kept  # parameters and inputs are there in any case
        address = storage_address(tensor)
        if address in self.counted:
            return kept
        self.counted.add(address)
        return self.ledger.keep_for_good(*kept, tensor.untyped_storage().nbytes())

    # The end of forward.

    @property
    def may_leave(self) -> bool:
        """Whether forward keeps to the plan from here on, and the plan has nothing for the tape to do."""
        expected = None if self.plan is None else self.plan.readings
        return expected is not None and self.parting is None and tuple(self.readings) == expected

    def leave(self) -> None:
        """Watch no longer; whoever calls it has seen to it that nobody else does since the tape does."""
        self.has_left = True
        self.watching.close()

    def finish(self) -> Parting | None:
        """Where forward left the plan, if it did."""
        self.storages.clear()
        if self.has_left:
            return None
        if self.plan is not None:
            for leaving in self.plan.leaving.values():
                self.let_go(leaving)
        if self.plan is None:
            return Parting(0, tuple(self.later))
        if self.parting is None and self.position < len(self.steps):
            self.parting = self.position
        if self.parting is None:
            return None
        return Parting(self.parting, (*self.plan.calls[: self.parting], *self.later))


class _ByOthers:
    """What hooks outside the tape packed: the user's, or those of a tape around this one."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Any) -> None:
        self.packed = packed
        self.unpack = unpack


@keep_dynamo_out
def unpack(packed: Any) -> Tensor:
    """The tensor that was packed; raises what eager raises if somebody has written to it since."""
    kind = type(packed)
    if kind is Handle:
        return packed.backward.unpack(packed)
    if kind is _ByOthers:
        return packed.unpack(packed.packed)
    if kind is KeptForGood:
        packed = packed.tensor, packed.version
    tensor, version = packed
    if tensor._version != version:
        raise modified_in_place(tensor.type(), tensor.shape, tensor._version, version)
    return tensor


def current_stream() -> int | None:
    """The CUDA stream that kernels are given to now; None before CUDA is used."""
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_stream().cuda_stream


def _alias(tensor: Tensor) -> Tensor:
    """Without the graph, with autograd's version counter; no mode sees it being made."""
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def _written_by(operator: Operator, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call changes."""
    places = operator.other_written
    if operator.written is not None:
        places = (operator.written,)
    elif operator.written_name is not None:
        return [kwargs[operator.written_name]]
    elif operator.statistics is not None:
        statistics, training = operator.statistics
        places = statistics if args[training] else ()
    found: list[Tensor] = []
    for place in places:
        argument = operator.argument(place, args, kwargs)
        found += argument if isinstance(argument, (list, tuple)) else (argument,)
    return [entry for entry in found if isinstance(entry, Tensor) and _has_storage(entry)]


def _has_storage(tensor: Tensor) -> bool:
    try:
        storage_address(tensor)
    except RuntimeError:
        return False
    return True


def _for_repetition(operator: Operator, args: Any) -> Any:
    """A batch norm's arguments for the notes: it must not update, nor read what others update without a trace."""
    harmless = without_running_statistics(operator.call, args)
    if harmless is not None:
        return harmless
    assert operator.statistics is not None
    read, _ = operator.statistics
    for place in read:
        if args[place] is not None:
            CHANGING.add(args[place])
    return args


def _on_cuda(args: Any) -> bool:
    return any(isinstance(argument, Tensor) and argument.is_cuda for argument in args)


def _has_shape(returned: Any, shape: tuple[int, ...]) -> bool:
    first = returned[0] if isinstance(returned, (tuple, list)) else returned
    return bool(first.shape == shape)


def _covers_storage(tensor: Tensor) -> bool:
    """Whether writing to all of the tensor writes to all of its storage."""
    if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
