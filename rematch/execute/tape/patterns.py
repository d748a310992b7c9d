"""What is the same in every run of a captured block: its notes, and what autograd saves, in its order.

`pattern = watch.pattern(outputs)` after the tape has followed a run, and `pattern.run(tape, inputs)` from then on
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from rematch.execute.tape.contents import Content, Handle, Layout, Note, Ref, layout_of, storage_address
from rematch.execute.tape.draws import Draw, generator_of
from rematch.execute.tape.dynamo import keep_dynamo_out
from rematch.execute.tape.operators import Operator
from rematch.execute.tape.plan import ContentKey, TapePlan
from rematch.execute.tape.tape import SMALL_BYTES, Tape, unpack

_INSIDE = "it reads what only the inside of an operator has"
_BY_TAPE, _KEPT, _LEAF = -1, -2, -3  # what becomes of a saved tensor whose content the block does not drop


class NoPattern(Exception):
    """Why the notes of a block cannot be made from a pattern."""


class Watch(Interpreter):
    """Runs a captured program and sees the tape's notes, what autograd saves, and where each tensor comes from."""

    def __init__(self, tape: Tape, graph: GraphModule, inputs: tuple[Any, ...]) -> None:
        super().__init__(graph)
        self.tape = tape
        self.inputs = inputs
        self.start = tape.position
        self.notes: list[Note] = []
        self.packed: list[_Packed] = []
        # The last node that shows a storage, by its address. No other storage has that address while this is there:
        # one made inside an operator would be taken for the value of a node that has died.
        self.nodes: dict[int, tuple[Node, StorageWeakRef]] = {}
        self.generator = generator_of(inputs)
        self.offset = None if self.generator is None else self.generator.get_offset()
        tape.watched_notes = self.notes

    def run_node(self, n: Node) -> Any:
        returned = super().run_node(n)
        if type(returned) is Tensor and returned.layout is torch.strided and n.op != "output":
            self.nodes[storage_address(returned)] = n, StorageWeakRef(returned.untyped_storage())
        return returned

    @keep_dynamo_out
    def pack(self, tensor: Tensor) -> Any:
        made = self.tape.pack(tensor)
        self.packed.append(_Packed(tensor, made, self.tape.position))
        return made

    def let_go(self) -> None:
        """Keep nothing that the plan does not: autograd keeps the hook as long as what the hook has packed."""
        if self.tape.plan is not None and self.tape.parting is None:
            _let_go_of_notes(self.notes, self.tape.plan.noted)
        self.inputs, self.notes, self.packed, self.nodes, self.args_iter = (), [], [], {}, iter(())
        self.tape.watched_notes = None
        self.env.clear()

    def pattern(self, outputs: tuple[Any, ...]) -> Pattern:
        """What is the same in every run of the program; `NoPattern` where something is not."""
        tape = self.tape
        if tape.parting is not None or tape.plan is None:
            raise NoPattern("it left the plan")
        for step in tape.steps[self.start : tape.position]:
            if step.rewritten or (step.operator is not None and step.operator.writes):
                raise NoPattern("it writes to tensors, or they are written to later")
        if not all(type(output) is Tensor for output in outputs):
            raise NoPattern("it returns something else than tensors")
        return _Learner(self, outputs).pattern()


def _let_go_of_notes(notes: list[Note], planned: frozenset[int]) -> None:
    """Have nothing refer to notes beyond the planned ones, or be held for them alone."""
    read = {id(content) for note in notes if note.position in planned for content in note.reads()}
    for note in notes:
        for _, found in note.outputs if note.position not in planned else ():
            content = found()
            if content is not None:
                content.note = None
                if id(content) not in read:
                    content.held = None


class _Packed:
    """What was seen of a tensor that autograd saved. Nothing here keeps its memory: the plan may want that."""

    def __init__(self, tensor: Tensor, made: Any, position: int) -> None:
        self.shape = tensor.shape
        self.position = position  # of the call in the plan that comes next
        self.content = made.saved.content if type(made) is Handle else None
        self.kept = _BY_TAPE
        if type(made) is tuple and (type(tensor) is Parameter or type(tensor) is Tensor):
            self.kept = _LEAF if made[0] is tensor else _KEPT
        self.version = self.address = 0
        self.storage: StorageWeakRef | None = None  # no other storage has the address while this is there
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            self.version, self.address = tensor._version, storage_address(tensor)
            self.storage = StorageWeakRef(tensor.untyped_storage())


class _Learner:
    """Finds for each content that the notes of a block read where it comes from in every run."""

    def __init__(self, watch: Watch, outputs: tuple[Tensor, ...]) -> None:
        self.watch = watch
        self.outputs = outputs
        self.contents: list[Content] = []  # made by the notes, then by calls without one
        self.numbers: dict[int, int] = {}  # by the content's id
        self.inputs: dict[int, int] = {}
        self.nodes: list[Node] = []  # whose values the program has to return as well
        self.packs: dict[tuple[int, int], int] = {}  # the first that shows a storage in this version
        for place, packed in enumerate(watch.packed):
            if packed.storage is not None:
                self.packs.setdefault((packed.address, packed.version), place)
        storages = watch.tape.storages
        for place, tensor in enumerate(watch.inputs):
            unknown = storages.unknown.get(storage_address(tensor))
            for content in (storages.noted.get(storage_address(tensor)), None if unknown is None else unknown()):
                if content is not None:
                    self.inputs.setdefault(id(content), place)

    def pattern(self) -> Pattern:
        watch = self.watch
        needed = self._needed_notes()
        for note in needed:
            for _, found in note.outputs:
                content = found()
                if content is not None:  # what nobody needs, nobody needs next time
                    self._number(content)
        made = len(self.contents)
        notes = [self._note(note) for note in needed]
        for key in self._moved():
            moved = watch.tape.backward.content(key)
            if moved is not None:
                self._number(moved)
        held_when_packed: dict[int, list[int]] = {}
        held_at_end: list[tuple[int, int]] = []
        for number, content in enumerate(self.contents):
            if content.held is None:
                continue
            saved_at = self._saved_at(content)
            if saved_at is not None:
                held_when_packed.setdefault(saved_at, []).append(number)
                continue
            returned_at = self._returned_at(content)
            if returned_at is not None:
                held_at_end.append((returned_at, number))
            elif content.note is None:
                raise NoPattern(_INSIDE)
        assert watch.tape.plan is not None
        return Pattern(
            plan=watch.tape.plan,
            start=watch.start,
            calls=watch.tape.position - watch.start,
            program=self._program(),
            returns=len(self.outputs),
            generator=watch.generator,
            notes=notes,
            contents=[self._content(content) for content in self.contents[:made]],
            without_note=[self._content(content) for content in self.contents[made:]],
            leaving=self._leaving(),
            packs=[self._pack(place) for place in range(len(watch.packed))],
            held_when_packed=held_when_packed,
            held_at_end=held_at_end,
            returned=self._returned(),
        )

    def _needed_notes(self) -> list[Note]:
        """Notes of the calls that the plan names, and of those inside operators whose small results they read."""
        plan = self.watch.tape.plan
        assert plan is not None
        needed = {note.position: note for note in self.watch.notes if note.position in plan.noted}
        inside = {id(note): note for note in self.watch.notes}
        pending = list(needed.values())
        while pending:
            for content in pending.pop().reads():
                note = inside.get(id(content.note))
                if content.held is None or note is None or self._is_at_hand(content):
                    continue
                if content.held.untyped_storage().nbytes() > SMALL_BYTES:
                    raise NoPattern(_INSIDE)
                if note.position not in needed:
                    needed[note.position] = note
                    pending.append(note)
        return [needed[position] for position in sorted(needed)]

    def _is_at_hand(self, content: Content) -> bool:
        return self._saved_at(content) is not None or self._returned_at(content) is not None

    def _number(self, content: Content) -> int:
        """Of a content that the block makes."""
        if id(content) not in self.numbers:
            self.numbers[id(content)] = len(self.contents)
            self.contents.append(content)
        return self.numbers[id(content)]

    def _note(self, note: Note) -> _NotePattern:
        if note.target is not None or note.operator.statistics is not None:
            raise NoPattern("it writes to tensors")
        offset = None
        if note.draw is not None:
            if self.watch.offset is None or note.draw.generator is not self.watch.generator:
                raise NoPattern("it draws from a generator whose state is not a number")
            offset = note.draw.state[1] - self.watch.offset
        return _NotePattern(
            note.operator,
            note.position,
            tuple(self._argument(argument) for argument in note.args),
            {name: self._argument(argument) for name, argument in note.kwargs.items()},
            [(index, self._number(content)) for index, found in note.outputs if (content := found()) is not None],
            offset,
        )

    def _argument(self, argument: Any) -> Any:
        if type(argument) is list:
            return [self._argument(entry) for entry in argument]
        if type(argument) is not Ref:
            return argument
        content, layout = argument.content, argument.layout
        place = self.inputs.get(id(content))
        if place is not None:
            shown: Tensor = self.watch.inputs[place]
            if layout is None and shown is not content.held:
                assert content.held is not None
                layout = layout_of(content.held)
            return _RefPattern(place, -1, layout, argument.requires_grad)
        if content.note is None and not content.moved and (content.held is None or content.owns_memory):
            raise NoPattern("it reads what others write to")
        if layout is None:
            assert content.held is not None
            layout = layout_of(content.held)
        return _RefPattern(-1, self._number(content), layout, argument.requires_grad)

    def _content(self, content: Content) -> _ContentPattern:
        kinds = content.dropped, content.dropped_later, content.constant, content.moved
        return _ContentPattern(content.index, content.position, content.version, *kinds)

    def _moved(self) -> list[ContentKey]:
        """What calls of the block make that goes to host memory."""
        plan, end = self.watch.tape.plan, self.watch.tape.position
        assert plan is not None
        return sorted(key for key in plan.moved if self.watch.start <= key[0] < end)

    def _leaving(self) -> dict[int, tuple[ContentKey, ...]]:
        """What is to be let go of, after the last saved tensor before the call that needs the memory.

        A block in which nothing is saved before that call lets go of it as it begins (-1).
        """
        tape = self.watch.tape
        assert tape.plan is not None
        found: dict[int, tuple[ContentKey, ...]] = {}
        for position in range(self.watch.start, tape.position):
            keys = tape.plan.leaving.get(position, ())
            if keys:
                place = bisect_right(self.watch.packed, position, key=lambda packed: packed.position) - 1
                found[place] = (*found.get(place, ()), *keys)
        return found

    def _pack(self, place: int) -> tuple[torch.Size, int]:
        packed = self.watch.packed[place]
        if packed.content is not None:
            return packed.shape, self.numbers.get(id(packed.content), _BY_TAPE)
        return packed.shape, packed.kept

    def _saved_at(self, content: Content) -> int | None:
        assert content.held is not None
        return self.packs.get((storage_address(content.held), content.held_version))

    def _returned_at(self, content: Content) -> int | None:
        """The place among what the program returns, if need be in addition to what the block does; or nowhere."""
        assert content.held is not None
        address = storage_address(content.held)
        for place, output in enumerate(self.outputs):
            if storage_address(output) == address:
                return place
        node, _ = self.watch.nodes.get(address, (None, None))
        if node is None or node.op == "placeholder":
            return None
        if node not in self.nodes:
            self.nodes.append(node)
        return len(self.outputs) + self.nodes.index(node)

    def _returned(self) -> list[tuple[int, int]]:
        """Of the outputs that show what a note of the block makes: their places and those contents."""
        noted = self.watch.tape.storages.noted
        shown = ((place, noted.get(storage_address(output))) for place, output in enumerate(self.outputs))
        return [(place, self.numbers[id(content)]) for place, content in shown if id(content) in self.numbers]

    def _program(self) -> Callable[..., Any]:
        """The captured program, which also returns `nodes`."""
        module = self.watch.module
        assert isinstance(module, GraphModule)
        if not self.nodes:
            _LazyGraphModule.force_recompile(module)  # else each call looks whether its code was written yet
            return module.forward
        graph = Graph()
        copies: dict[Node, Node] = {}
        returned = graph.graph_copy(module.graph, copies)
        graph.output((*returned, *(copies[node] for node in self.nodes)))  # type: ignore[misc]
        return GraphModule(module, graph).forward


class _RefPattern:
    __slots__ = ("input", "layout", "number", "requires_grad")

    def __init__(self, place: int, number: int, layout: Layout | None, requires_grad: bool) -> None:
        self.input = place  # of the program, or -1:
        self.number = number  # of a content that the block makes
        self.layout = layout
        self.requires_grad = requires_grad


class _NotePattern(NamedTuple):
    operator: Operator
    position: int
    args: tuple[Any, ...]  # with a `_RefPattern` for each `Ref`
    kwargs: dict[str, Any]
    outputs: list[tuple[int, int]]  # of each content: its place among what the call returns, its number
    offset: int | None  # from where the generator stood when the block began; None: it draws nothing


class _ContentPattern(NamedTuple):
    place: int  # among what its call returns
    position: int
    version: int
    dropped: bool
    dropped_later: bool
    constant: bool
    moved: bool

    def made(self, note: Note | None, index: int) -> Content:
        content = Content(note, index, self.version, self.dropped)
        content.position = self.position
        content.dropped_later, content.constant, content.moved = self.dropped_later, self.constant, self.moved
        return content


@dataclass(frozen=True)
class Pattern:
    """What is the same in every run of a program under one plan."""

    plan: TapePlan
    start: int  # the position of its first call in the plan
    calls: int
    program: Callable[..., Any]
    returns: int  # of what the program returns, how much is the block's
    generator: torch.Generator | None
    notes: list[_NotePattern]
    contents: list[_ContentPattern]  # those that the notes make, in their order,
    without_note: list[_ContentPattern]  # and those that other calls make for them, or for host memory
    leaving: dict[int, tuple[ContentKey, ...]]  # by the number of the saved tensor after which memory is let go of
    packs: list[tuple[torch.Size, int]]  # of each saved tensor: its shape, and its content if the block drops that
    held_when_packed: dict[int, list[int]]
    held_at_end: list[tuple[int, int]]  # place among what the program returns, content
    returned: list[tuple[int, int]]  # place, content

    def run(self, tape: Tape, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        contents = self._make_notes(tape, inputs)
        if self.leaving:
            tape.let_go(self.leaving.get(-1, ()))
        saving = _Saving(self, tape, contents)
        with saved_tensors_hooks(saving.pack, unpack):
            outputs = self.program(*inputs)
        saving.let_go()
        if saving.place != len(self.packs):
            raise _changed(saving.place, len(self.packs))
        for place, number in self.held_at_end:
            _hold(contents[number], outputs[place])
        for place, number in self.returned:
            storage = outputs[place].untyped_storage()
            tape.storages.put(storage, storage._cdata, contents[number])
        tape.position += self.calls
        return outputs if len(outputs) == self.returns else outputs[: self.returns]

    def _make_notes(self, tape: Tape, inputs: tuple[Tensor, ...]) -> list[Content]:
        """This run's notes; returns the contents that the block makes."""
        generator = self.generator
        seed, offset = (0, 0) if generator is None else (generator.initial_seed(), generator.get_offset())
        contents: list[Content] = []
        made: list[Note] = []
        patterns = iter(self.contents)
        for pattern in self.notes:
            note = Note(pattern.operator, (), {}, pattern.position)
            if pattern.offset is not None:
                assert generator is not None
                note.draw = Draw(generator, (seed, offset + pattern.offset))
            for index, _ in pattern.outputs:
                content = next(patterns).made(note, index)
                contents.append(content)
                note.outputs.append((index, weakref.ref(content)))
            made.append(note)
        contents += [pattern.made(None, pattern.place) for pattern in self.without_note]
        for content in contents:
            if content.moved:
                tape.backward.contents[content.key] = weakref.ref(content)

        arguments = _Arguments(tape, inputs, contents)
        expect = None if tape.backward.plan is None else tape.backward.expect
        for note, pattern in zip(made, self.notes, strict=True):
            note.args = tuple([arguments.of(entry) for entry in pattern.args])
            if pattern.kwargs:
                note.kwargs = {name: arguments.of(entry) for name, entry in pattern.kwargs.items()}
            if expect is not None:
                expect(note)
        return contents


class _Arguments:
    """Arguments of one run's notes. No closure: one that calls itself is garbage for a collector."""

    __slots__ = ("contents", "inputs", "read", "tape")

    def __init__(self, tape: Tape, inputs: tuple[Tensor, ...], contents: list[Content]) -> None:
        self.tape = tape
        self.inputs = inputs
        self.contents = contents
        self.read: dict[int, Content] = {}  # by the place of the input

    def of(self, pattern: Any) -> Any:
        if type(pattern) is _RefPattern:
            place = pattern.input
            if place < 0:
                return Ref(self.contents[pattern.number], pattern.layout, pattern.requires_grad)
            content = self.read.get(place)
            if content is None:
                content = self.read[place] = self.tape.content_of(self.inputs[place])
            return Ref(content, pattern.layout, pattern.requires_grad)
        return [self.of(entry) for entry in pattern] if type(pattern) is list else pattern


class _Saving:
    """Takes what autograd saves in one run of a pattern."""

    __slots__ = ("contents", "pattern", "place", "tape")

    def __init__(self, pattern: Pattern, tape: Tape, contents: list[Content]) -> None:
        self.pattern = pattern
        self.tape = tape
        self.contents = contents
        self.place = 0

    @keep_dynamo_out
    def pack(self, tensor: Tensor) -> Any:
        place, packs = self.place, self.pattern.packs
        self.place = place + 1
        if place >= len(packs) or tensor.shape != packs[place][0]:
            raise _changed(place, len(packs))
        for number in self.pattern.held_when_packed.get(place, ()):
            _hold(self.contents[number], tensor)
        packed = self._packed(tensor, packs[place][1])
        if place in self.pattern.leaving:
            self.tape.let_go(self.pattern.leaving[place])
        return packed

    def _packed(self, tensor: Tensor, dropped: int) -> Any:
        if dropped >= 0:
            return self.tape.handle(tensor, self.contents[dropped], tensor._version)
        if dropped == _BY_TAPE:
            return self.tape.pack(tensor)
        return (tensor if dropped == _LEAF else tensor.detach()), tensor._version

    def let_go(self) -> None:
        """Autograd keeps the hook as long as what the hook has packed."""
        self.contents = []


def _hold(content: Content, tensor: Tensor) -> None:
    content.hold(tensor.detach(), tensor._version, storage_address(tensor))


def _changed(place: int, expected: int) -> RuntimeError:
    return RuntimeError(
        f"a captured block saves other tensors for backward than before (at {place} of {expected}), which its guards "
        "should have ruled out. Please report it; engine='replay' or a larger budget avoids it"
    )
