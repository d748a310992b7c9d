"""The front door of capture: a module and its arguments in, what eager's training step runs out.

`recording = record(module, module.forward, (batch,), {}, loss=loss, profile=profile)`
"""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from rematch.capture.as_eager import AsEager
from rematch.capture.checkpoints import checkpoint_regions
from rematch.capture.cost import Call, Profile
from rematch.capture.recorder import CannotRecord, Recorded, Recorder
from rematch.capture.recording import Recording
from rematch.capture.stand_ins import random_states_kept, stood_in_for
from rematch.capture.structures import tensors_in
from rematch.errors import CaptureError
from rematch.graph import Phase

Loss = Callable[[Any], torch.Tensor]


def record(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Loss | None,
    profile: Callable[[Call], Profile],
    holds_outputs: bool = False,
    accumulate: bool = False,
    taken: frozenset[str] = frozenset(),
    replace_checkpoints: bool = False,
) -> Recording:
    """Record a training step of `forward`, which is that of `module`, without running or changing anything.

    Without `loss`, backward starts from gradients of the scalars that forward returns, or else of all its
    differentiable outputs. `holds_outputs` says that the user keeps what forward returns until backward ends,
    `accumulate` that gradients are there already, to be added to, even if they are not now, and `taken` names the
    parameters whose gradients a hook takes away as soon as they are there. Regions under `torch.utils.checkpoint` are
    recorded as they run, or as plain code with `replace_checkpoints`.
    `CannotRecord` is raised where forward needs data; errors of the user's own code pass through.
    """
    states: list[int] = []
    askers: list[str] = []

    def profile_unseen(call: Call) -> Profile:
        """Measuring takes states of generators too, which are none of the step's."""
        taken = len(states)
        found = profile(call)
        del states[taken:]
        return found

    recorder = Recorder(profile_unseen)
    with ExitStack() as stack:
        stack.enter_context(_refusals_told_apart())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(random_states_kept(_devices(module, args, kwargs)))
        stand_ins = _stand_ins(recorder, module, accumulate, taken)
        stack.enter_context(stood_in_for(module, {identity: made for identity, (made, _) in stand_ins.items()}))
        given_args, given_kwargs = _inputs(recorder, args, kwargs)
        stack.enter_context(_paths_noted(module, recorder))
        stack.enter_context(_questions_noted(states, askers))
        regions = stack.enter_context(checkpoint_regions(replace_checkpoints))
        stack.enter_context(AsEager())
        stack.enter_context(recorder)
        hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack)
        with hooks:
            outputs = forward(*given_args, **given_kwargs)
            del given_args, given_kwargs
            forward_until = len(recorder.calls)
            kept_states = len(states)
            checkpoints = regions.entered
            recorder.phase = Phase.LOSS
            recorder.path.clear()
            leaves = [leaf for leaf in tensors_in(outputs) if isinstance(leaf, Recorded)]
            differentiable = [leaf for leaf in leaves if leaf.requires_grad]
            output_storages = tuple(dict.fromkeys(leaf.hold.storage for leaf in leaves))
            roots = _roots(outputs, differentiable, loss)
            root_storages = tuple(dict.fromkeys(root.hold.storage for root in roots if isinstance(root, Recorded)))
        tangents = None if loss is not None else [_tangent(root) for root in roots]
        kept = outputs if holds_outputs else None
        del outputs, leaves, differentiable
        torch.clear_autocast_cache()  # as leaving autocast does before backward: casts of weights are let go
        loss_at = len(recorder.calls)
        recorder.phase = Phase.BACKWARD
        if roots:
            _backward(roots, tangents)
        gradients = {
            name: made.grad.hold.storage for made, name in stand_ins.values() if isinstance(made.grad, Recorded)
        }
        recording = Recording(
            calls=tuple(recorder.calls),
            storages=tuple(recorder.storages),
            forward_until=forward_until,
            loss_at=loss_at,
            outputs=output_storages,
            roots=root_storages,
            gradients=gradients,
            reads=recorder.reads,
            readings=None if recorder.readings is None else tuple(recorder.readings),
            has_loss=loss is not None,
            unseen_bytes=_bytes_at_once(states, kept_states),
            asks_for_compiler=bool(askers),
            checkpoints=checkpoints,
        )
        del roots, tangents, kept
    return recording


# Parts of what torch says where a tensor has no memory, or where our hooks are in the way.
_SAID_FOR_WANT_OF_DATA = ("data is not allocated yet", "Cannot access data pointer", "support saved tensor hooks")


@contextmanager
def _refusals_told_apart() -> Iterator[None]:
    """Errors that recording itself causes are `CannotRecord`; all others are the user's own."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if any(part in str(error) for part in _SAID_FOR_WANT_OF_DATA):
            raise CannotRecord(str(error).splitlines()[0]) from error
        raise


def _backward(roots: list[torch.Tensor], tangents: list[torch.Tensor] | None) -> None:
    """As `loss.backward()` does outside of autocast, whose cache of casts is gone by then."""
    torch.clear_autocast_cache()
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        torch.autograd.backward(roots, tangents)


class _Questions(threading.local):
    """What a thread that records has asked of torch where no dispatcher sees it."""

    states: list[int] | None = None  # sizes of states that it took of the CPU's generator: checkpoints keep them
    askers: list[str] | None = None  # modules, torch's and ours aside, that asked whether torch.compile traces them


_QUESTIONS = _Questions()
_LOCK = threading.Lock()
_recordings = 0  # at once, in all threads


@contextmanager
def _questions_noted(states: list[int], askers: list[str]) -> Iterator[None]:
    """The lists get what this thread asks inside."""
    before = _QUESTIONS.states, _QUESTIONS.askers
    _QUESTIONS.states, _QUESTIONS.askers = states, askers
    _listen(1)
    try:
        yield
    finally:
        _listen(-1)
        _QUESTIONS.states, _QUESTIONS.askers = before


_take_state = torch.get_rng_state
_is_compiling = torch.compiler.is_compiling


def _listen(more: int) -> None:
    """Stand in for torch's own functions while any thread records."""
    global _recordings
    with _LOCK:
        _recordings += more
        torch.get_rng_state = torch.random.get_rng_state = _state_taken if _recordings else _take_state
        torch.compiler.is_compiling = _asked if _recordings else _is_compiling


def _state_taken() -> torch.Tensor:
    state = _take_state()
    if _QUESTIONS.states is not None:
        _QUESTIONS.states.append(state.nbytes)
    return state


def _asked() -> bool:
    if _QUESTIONS.askers is not None:
        asker = _caller_of(inspect.currentframe())
        if asker.partition(".")[0] not in ("torch", "rematch"):
            _QUESTIONS.askers.append(asker)
    return _is_compiling()


def _caller_of(frame: types.FrameType | None) -> str:
    """The module whose code called that of `frame`. A frame that kept itself would keep its caller's tensors too."""
    caller = None if frame is None else frame.f_back
    return "" if caller is None else str(caller.f_globals.get("__name__"))


def _bytes_at_once(sizes: list[int], kept: int) -> int:
    """Those that forward took are held until backward, which takes its own one after the other."""
    return sum(sizes[:kept]) + max(sizes[kept:], default=0)


def _roots(outputs: Any, differentiable: list[Recorded], loss: Loss | None) -> list[torch.Tensor]:
    """What backward starts from."""
    if loss is not None:
        value = loss(outputs)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise CaptureError(
                f"loss= must return one differentiable number for the model's output, not {type(value).__name__}"
                + (f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "")
            )
        return [value]
    scalars = [leaf for leaf in differentiable if leaf.numel() == 1]
    return list(scalars[:1] or differentiable)


def _tangent(root: torch.Tensor) -> torch.Tensor:
    """The gradient that the user's loss will give for an output."""
    return torch.ones_like(root, memory_format=torch.preserve_format)


def _devices(module: nn.Module, args: Any, kwargs: Any) -> list[torch.device]:
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return list(dict.fromkeys(tensor.device for tensor in tensors))


def _stand_ins(
    recorder: Recorder, module: nn.Module, accumulate: bool, taken: frozenset[str]
) -> dict[int, tuple[torch.Tensor, str]]:
    """By identity: what stands for each parameter and buffer, and its name."""
    found: dict[int, tuple[torch.Tensor, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in found:
            made = nn.Parameter(recorder.resident(parameter, name, "parameters"), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            if parameter.is_leaf and parameter.grad is not None:
                made.grad = recorder.resident(parameter.grad, f"{name}.grad", "gradients")
            elif accumulate and parameter.requires_grad:
                made.grad = recorder.resident_like(parameter, f"{name}.grad", "gradients")
            if name in taken:
                made.register_post_accumulate_grad_hook(_take_gradient)
            found[id(parameter)] = (made, name)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if id(buffer) not in found:
            found[id(buffer)] = (recorder.resident(buffer, name, "buffers"), name)
    return found


def _take_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _inputs(recorder: Recorder, args: Any, kwargs: Any) -> Any:
    def stand_in(real: torch.Tensor) -> torch.Tensor:
        made = recorder.resident(real, "input", "inputs")
        return (
            made.requires_grad_(real.requires_grad) if real.is_leaf or not real.requires_grad else made.requires_grad_()
        )

    return pytree.tree_map_only(torch.Tensor, stand_in, (args, kwargs))


@contextmanager
def _paths_noted(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """The recorder knows which submodule runs."""
    names = {part: name for name, part in module.named_modules()}

    def enter(part: nn.Module, _: Any) -> None:
        recorder.path.append(names.get(part, recorder.path[-1] if recorder.path else ""))

    def leave(part: nn.Module, _: Any, __: Any) -> None:
        if recorder.path:
            recorder.path.pop()

    before = register_module_forward_pre_hook(enter)
    after = register_module_forward_hook(leave)
    try:
        yield
    finally:
        before.remove()
        after.remove()
