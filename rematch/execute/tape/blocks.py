"""Blocks of a module that run as Dynamo captured them, so that the tape need not follow their operators one by one.

`with Blocks.of(module).watched_by(tape): forward()`

Following an operator costs the host more than starting its kernel does, and a card that is faster than that waits. What
a captured block runs is known beforehand: Dynamo's guards hold the program to what it was, down to every number in it.
The first time, the tape follows the captured program as it follows everything, and its notes become a pattern. From
then on the program runs unseen, and the notes are made from the pattern: with this call's inputs, and with what
autograd saves in the order in which it saves it.

A block that Dynamo cannot capture whole, that draws from a generator whose state is no number, or that writes to
tensors runs as ever. Where everything is kept and the data can no longer decide for another path, the tape stops
watching as the next block begins.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._ops import HigherOrderOperator
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from rematch.execute.own_code import own_code
from rematch.execute.tape.dynamo import keep_dynamo_out
from rematch.execute.tape.patterns import NoPattern, Pattern, Watch
from rematch.execute.tape.tape import Tape, current_stream, unpack
from rematch.execute.tape.threads import thread

log = logging.getLogger("rematch")


class Blocks:
    """The blocks of one module, for one plan."""

    def __init__(self, modules: list[nn.Module], *, captured: bool = True) -> None:
        captures: dict[Any, _Capture | None] = {}
        self._blocks: list[_Block] = []
        for module in modules:
            kind = _alike(module)
            if kind not in captures:
                captures[kind] = _Capture(type(module)) if captured else None
            self._blocks.append(_Block(module, captures[kind]))
        self._lock = threading.Lock()
        self._attention: tuple[bool, ...] | None = None  # kernels that were allowed when the blocks were captured

    @staticmethod
    def of(module: nn.Module, *, captured: bool = True) -> Blocks:
        """The entries of the outermost lists that have modules of their own, if nobody has a hand in their calls.

        Not `captured`, they are only where a tape may stop watching.
        """
        return Blocks([block for block in _entries_of_lists(module) if _is_untouched(block)], captured=captured)

    @contextmanager
    def watched_by(self, tape: Tape) -> Iterator[None]:
        """Have the blocks run as captured in this thread's forward; another thread's forward runs as ever."""
        allowed = _allowed_attention()
        self._attention = self._attention or allowed
        if not self._blocks or allowed != self._attention or not self._lock.acquire(blocking=False):
            yield
            return
        try:
            for block in self._blocks:
                block.enter(tape)
            yield
        finally:
            for block in self._blocks:
                block.leave()
            self._lock.release()

    @property
    def misled(self) -> bool:
        """Whether a forward left its plan because a captured block runs what eager does not."""
        return any(block.misled for block in self._blocks)

    @property
    def unseen(self) -> int:
        """How many calls of blocks ran by a pattern so far."""
        return sum(block.unseen for block in self._blocks)


class _Block:
    """One submodule; its `forward` is replaced while a tape runs."""

    def __init__(self, module: nn.Module, capture: _Capture | None) -> None:
        self.module = module
        self.unseen = 0
        self.misled = False  # what was captured is another program than eager's
        self.tape: Tape | None = None
        self._thread = 0
        self._capture = capture  # None: it cannot be captured, or need not be

    def enter(self, tape: Tape) -> None:
        if self._capture is not None or (tape.plan is not None and tape.plan.only_watches):
            self.tape, self._thread = tape, threading.get_ident()
            self.module.__dict__["forward"] = self._forward

    def leave(self) -> None:
        self.module.__dict__.pop("forward", None)
        self.tape = None

    @keep_dynamo_out
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        tape, capture = self.tape, self._capture
        if tape is None or threading.get_ident() != self._thread or not _follows(tape):
            return type(self.module).forward(self.module, *args, **kwargs)
        if tape.may_leave:
            tape.leave()
            capture = None
        if capture is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        position = tape.position
        try:
            # Dynamo does not look at what a mode sees, and it warns of what it does itself when it captures.
            with _pop_mode_temporarily(), nullcontext() if self.unseen else _without_warnings():
                return capture.call(self, args, kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as refusal:
            if tape.position != position:
                raise
            log.info("%s is followed operator by operator: %s", type(self.module).__name__, _first_line(refusal))
            self._capture = None
        return type(self.module).forward(self.module, *args, **kwargs)


def _alike(module: nn.Module) -> Any:
    """What blocks have in common that share a capture.

    Dynamo compiles one piece of code a few times only, and the blocks of a U-Net all have other sizes.
    """
    tensors = (*module.named_parameters(), *module.named_buffers())
    return type(module), tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)


class _Capture:
    """What Dynamo makes of blocks that are alike."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self._compiled: Callable[..., Any] = torch.compile(
            own_code(kind.forward), backend=self._backend, fullgraph=True, dynamic=False
        )
        self._caller: _Block | None = None

    def call(self, block: _Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer, self._caller = self._caller, block
        try:
            return self._compiled(block.module, *args, **kwargs)
        finally:
            self._caller = outer

    def _backend(self, graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        if not all(type(example) is Tensor or type(example) is Parameter for example in examples):
            raise NoPattern("it takes something else than plain tensors")
        if any(_is_region(node.target) for node in graph.graph.nodes):
            raise NoPattern("it has regions that run as a whole: checkpoints, or transforms of torch.func")
        program = _Program(graph)

        @keep_dynamo_out
        def run(*inputs: Any) -> Any:
            assert self._caller is not None, "Dynamo calls it where a block was called"
            return program.run(self._caller, inputs)

        return run


class _Program:
    """What Dynamo made of a block under one set of guards; others of its class may share it."""

    def __init__(self, graph: GraphModule) -> None:
        self.graph = graph
        self.patterns: dict[int, Pattern | None] = {}  # by the position where a block begins; None: there is none

    def run(self, block: _Block, inputs: tuple[Any, ...]) -> Any:
        tape = block.tape
        assert tape is not None, "only a tape captures blocks"
        pattern = self.patterns.get(tape.position)
        if pattern is not None and pattern.plan is tape.plan:
            block.unseen += 1
            return pattern.run(tape, inputs)
        outputs = self._followed(tape, inputs, type(block.module).__name__)
        if tape.parting is not None:
            block.misled = True
            tape.backward.plan = None  # the order of backward is that of another program, too
        return outputs

    def _followed(self, tape: Tape, inputs: tuple[Any, ...], name: str) -> Any:
        """Run under the eyes of the tape, and learn from its notes what can be learned."""
        if tape.position in self.patterns:
            with tape:
                return self.graph.forward(*inputs)
        watch = Watch(tape, self.graph, inputs)
        with tape, saved_tensors_hooks(watch.pack, unpack):
            outputs = watch.run(*inputs)
        self.patterns[watch.start] = None
        try:
            self.patterns[watch.start] = watch.pattern(outputs)
        except NoPattern as why:
            log.info("%s is followed operator by operator: %s", name, why)
        finally:
            watch.let_go()
        return outputs


def _follows(tape: Tape) -> bool:
    """Whether the tape is what looks on now, and knows the way."""
    return (
        tape.parting is None
        and tape.outer is None
        and not tape.inside_others
        and not thread.not_forward
        and tape.stream == current_stream()
        and torch.is_grad_enabled()
        and _get_current_dispatch_mode() is tape
        and _takes_saved_tensors(tape)
        and not torch._dynamo.config.disable
        and torch._dynamo.eval_frame._stance.stance == "default"  # the user may have told Dynamo to stay out
    )


def _allowed_attention() -> tuple[bool, ...]:
    """What decides which operator an attention runs, and is in no guard of Dynamo's."""
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _takes_saved_tensors(tape: Tape) -> bool:
    """Whether what autograd saves now comes to the tape, and not to a checkpoint or to hooks of the user inside."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    return hooks is not None and getattr(hooks[0], "__self__", None) is tape


def _is_region(target: Any) -> bool:
    return isinstance(target, HigherOrderOperator) or "functorch" in str(getattr(target, "__module__", ""))


def _entries_of_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
            yield from (entry for entry in child if entry is not None and any(True for _ in entry.children()))
        else:
            yield from _entries_of_lists(child)


def _is_untouched(block: nn.Module) -> bool:
    """Whether calls inside are calls of the classes' own `forward`, and nobody looks on."""
    for module in block.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if "forward" in module.__dict__ or (module is not block and any(hooks)):
            return False
    return True


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        yield


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
