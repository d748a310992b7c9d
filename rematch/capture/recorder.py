"""Record what eager runs: the module's own Python, the loss and torch's own autograd, on tensors without data.

`recording = record(module, forward, (batch,), {}, loss=loss, profile=profile)`

A `Recorded` tensor has shape, strides, dtype and device, and no memory. A dispatch mode below autograd and autocast
writes down each operator and answers it by fake kernels, corrected by what the real ones return. Nothing of the user's
changes: parameters are stood in for, attributes, random states and gradients are put back. A value that Python reads
is computed from the real sample, by the slice of the recording that leads to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rematch.capture.aten import PASS_THROUGH, can_be_tried
from rematch.capture.cost import Call, Profile, Result
from rematch.capture.evaluate import Evaluator
from rematch.capture.recording import Holding, RecordedCall, RecordedStorage, SavedTensor, TensorRef
from rematch.errors import RematchError
from rematch.graph import Phase

_REPLACES_STORAGE = ("set_", "resize_", "resize_as_")
_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)


class CannotRecord(Exception):
    """The module needs data that a recording does not have; the message says what asked for it."""


class _Hold:
    """Lives as long as tensors show its storage, and tells the recorder when the last of them goes."""

    __slots__ = ("__weakref__", "recorder", "since", "storage")

    def __init__(self, recorder: Recorder, storage: int) -> None:
        self.recorder = weakref.ref(recorder)
        self.storage = storage
        self.since = len(recorder.calls)

    def __del__(self) -> None:
        recorder = self.recorder()
        if recorder is not None:
            asked = recorder.unpackings > recorder.unpackings_before_call
            recorder.storages[self.storage].held.append(Holding(self.since, len(recorder.calls), asked))


class Recorded(torch.Tensor):
    """A tensor without data. `fake` has its shape, strides and dtype; `hold` keeps its storage alive."""

    fake: torch.Tensor
    hold: _Hold
    recorder: weakref.ref[Recorder]

    @staticmethod
    def __new__(cls, fake: torch.Tensor, hold: _Hold, recorder: Recorder) -> Recorded:
        made: Recorded = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            fake.shape,
            strides=fake.stride(),
            storage_offset=fake.storage_offset(),
            dtype=fake.dtype,
            layout=fake.layout,
            device=fake.device,
        )
        if fake.is_conj():
            torch._C._set_conj(made, True)  # type: ignore[attr-defined]
        if fake.is_neg():
            torch._C._set_neg(made, True)  # type: ignore[attr-defined]
        made.fake, made.hold, made.recorder = fake, hold, weakref.ref(recorder)
        return made

    def __init__(self, fake: torch.Tensor, hold: _Hold, recorder: Recorder) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Reached when the mode is off, as in threads of a library: the recorder of any argument answers."""
        leaves = pytree.tree_leaves((args, kwargs))
        recorder = next((leaf.recorder() for leaf in leaves if isinstance(leaf, Recorded)), None)
        if recorder is None:
            raise CannotRecord(f"{func} was called on a tensor of a recording that has ended")
        return recorder.__torch_dispatch__(func, types, args, kwargs)

    def _read(self, by: Callable[[torch.Tensor], Any]) -> Any:
        """What `by` finds in the real data; what it runs for that is no part of the recording."""
        recorder = self.recorder()
        if recorder is None:
            raise CannotRecord("a value of a recording was asked for after it had ended")
        with _disable_current_modes():
            return by(recorder.read(self))

    def data_ptr(self) -> int:
        raise CannotRecord("forward asks for the address of a tensor (data_ptr)")

    def numpy(self, *, force: bool = False) -> Any:
        return self._read(lambda real: real.numpy(force=force))

    def __array__(self, dtype: Any = None) -> Any:
        return self._read(lambda real: real.__array__(dtype))

    def tolist(self) -> Any:
        return self._read(torch.Tensor.tolist)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return self._read(repr)

    def __format__(self, spec: str) -> str:
        return self._read(lambda real: format(real, spec))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CannotRecord("forward pickles or copies a tensor")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.clone()


class Recorder(TorchDispatchMode):
    """Writes down what is dispatched; see the module."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, profile: Callable[[Call], Profile]) -> None:
        super().__init__()
        self.profile = profile
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=False)
        self.calls: list[RecordedCall] = []
        self.storages: list[RecordedStorage] = []
        self.versions: list[int] = []
        self.phase = Phase.FORWARD
        self.path: list[str] = []
        self.reads = 0
        self.readings: list[str] | None = []  # of forward; see `Recording`
        self.unpackings = 0
        self.unpackings_before_call = 0  # when the last call came
        self.evaluator = Evaluator(self.calls)
        self._constants: dict[int, tuple[torch.Tensor, Recorded]] = {}  # real tensors met on the way
        self._by_real_storage: dict[int, Recorded] = {}
        self._holds: dict[int, weakref.ref[_Hold]] = {}
        self._path_of_node: dict[int, str] = {}  # by autograd's number of the node

    # Tensors in and out

    def resident(self, real: torch.Tensor, name: str, role: str) -> Recorded:
        """Stands for a real tensor that exists before the step."""
        key = real.untyped_storage()._cdata
        known = self._by_real_storage.get(key)
        with _disable_current_modes(), torch.no_grad():
            fake: torch.Tensor = self.fake_mode.from_tensor(real.detach(), static_shapes=True)
        if known is not None:
            with self.fake_mode, torch.no_grad():
                base = known.fake
                if base.dtype == fake.dtype:
                    fake = torch.as_strided(base, fake.shape, fake.stride(), fake.storage_offset())
            return Recorded(fake, known.hold, self)
        storage = self._new_storage(real.untyped_storage().nbytes(), real.device, name, role)
        self.evaluator.give(storage, real)
        made = Recorded(fake, self._hold(storage), self)
        self._by_real_storage[key] = made
        return made

    def resident_like(self, real: torch.Tensor, name: str, role: str) -> Recorded:
        """Stands for a tensor of the same kind that will exist before the step."""
        with _disable_current_modes(), torch.no_grad():
            fake: torch.Tensor = self.fake_mode.from_tensor(real.detach(), static_shapes=True)
        with self.fake_mode, torch.no_grad():
            fake = torch.empty_like(fake)
        storage = self._new_storage(fake.untyped_storage().nbytes(), real.device, name, role)
        return Recorded(fake, self._hold(storage), self)

    def _constant(self, real: torch.Tensor) -> Recorded:
        known = self._constants.get(id(real))
        if known is None:
            if type(real) is not torch.Tensor and not isinstance(real, nn.Parameter):
                raise CannotRecord(f"forward uses a tensor of type {type(real).__name__}")
            known = self._constants[id(real)] = (real, self.resident(real, "constant", "constants"))
        return known[1]

    def _new_storage(self, size_bytes: int, device: torch.device, name: str = "", role: str = "") -> int:
        self.storages.append(RecordedStorage(size_bytes, device, name, role))
        self.versions.append(0)
        return len(self.storages) - 1

    def _hold(self, storage: int) -> _Hold:
        known = self._holds.get(storage)
        hold = known() if known is not None else None
        if hold is None:
            hold = _Hold(self, storage)
            self._holds[storage] = weakref.ref(hold)
        return hold

    def ref(self, tensor: Recorded) -> TensorRef:
        storage = tensor.hold.storage
        return TensorRef(storage, self.versions[storage], tensor.fake)

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, structure = pytree.tree_flatten((args, kwargs))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Recorded):
                leaves[place] = self._constant(leaf)
        if func in PASS_THROUGH:
            source = leaves[0]
            with self.fake_mode, torch.no_grad():
                return Recorded(source.fake.detach(), source.hold, self)
        if not isinstance(func, OpOverload):
            raise CannotRecord(f"forward uses the higher-order operator {func}")
        fakes = [leaf.fake if isinstance(leaf, Recorded) else leaf for leaf in leaves]
        if turns := _turns_in_place(func):
            with self.fake_mode, torch.no_grad():
                fakes[0] = fakes[0].detach()  # calls before keep the layout that they were given
        fake_args, fake_kwargs = pytree.tree_unflatten(fakes, structure)
        refs = [self.ref(leaf) if isinstance(leaf, Recorded) else leaf for leaf in leaves]
        ref_args, ref_kwargs = pytree.tree_unflatten(refs, structure)
        if func in _READS:
            self.reads += 1
            self._append(func, (ref_args, ref_kwargs))
            found = self.evaluator.run(func, ref_args, ref_kwargs)
            if self.readings is not None and self.phase is Phase.FORWARD:
                self.readings.append(repr(found))
            return found
        returned, real = self._answer(func, (fake_args, fake_kwargs), (ref_args, ref_kwargs))
        if turns:
            _turn(leaves[0], fakes[0], func, pytree.tree_unflatten(leaves, structure))
        return self._note(func, pytree.tree_unflatten(leaves, structure), (ref_args, ref_kwargs), returned, real)

    def _answer(self, func: OpOverload, fakes: Any, refs: Any) -> tuple[Any, Any]:
        """Fake results of an operator, and the real ones where only data could tell."""
        try:
            with self.fake_mode, torch.no_grad():
                return func(*fakes[0], **fakes[1]), None
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._really(func, *refs)
        except Exception:  # some fake kernels refuse what the real ones take; an error of the user's comes up again
            profile, _ = self._profile(func, refs)
            if profile is None or any(result is not None and result.alias is not None for result in profile.results):
                return self._really(func, *refs)
            made = [None if result is None else self._fake_of(result) for result in profile.results]
            return (made if len(func._schema.returns) > 1 else made[0]), None

    def _really(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Run an operator on the real sample; returns fakes of what it gave, and that."""
        self.reads += 1
        self.readings = None
        real = self.evaluator.run(func, args, kwargs)
        if not isinstance(real, torch.Tensor) and not isinstance(real, (tuple, list)):
            return real, None
        fake = pytree.tree_map_only(torch.Tensor, lambda t: self.fake_mode.from_tensor(t, static_shapes=True), real)
        return fake, real

    def _note(self, func: OpOverload, given: Any, refs: Any, returned: Any, real: Any) -> Any:
        """Write a call down, and return what it returned as recorded tensors."""
        leaves = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        if any(isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided for leaf in leaves):
            raise CannotRecord(f"{func} returns a sparse tensor")
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Recorded)]
        owners = {} if real is not None else {tensor.fake.untyped_storage()._cdata: tensor.hold for tensor in tensors}
        holds = [owners.get(_storage_key(leaf)) for leaf in leaves]
        is_new = [isinstance(leaf, torch.Tensor) and hold is None for leaf, hold in zip(leaves, holds, strict=True)]
        writes = _written(func, *given)
        profile, class_key = None, ""
        if (any(is_new) or writes) and real is None:
            profile, class_key = self._profile(func, refs)
        results = profile.results if profile is not None else ()
        for storage in writes:
            self.versions[storage] += 1
        self._append(func, refs, writes=writes, profile=profile, class_key=class_key)  # results are born after it
        same = _returned_arguments(func, *given)
        made: dict[int | None, _Hold] = {}
        outputs: list[Any] = []
        for place, leaf in enumerate(leaves):
            hold = holds[place]
            if place in same:
                outputs.append(same[place])
            elif not isinstance(leaf, torch.Tensor):
                outputs.append(leaf)
            elif hold is not None:
                outputs.append(Recorded(leaf, hold, self))
            else:
                result = results[place] if place < len(results) else None
                key = _storage_key(leaf)
                if key not in made:
                    size_bytes = leaf.untyped_storage().nbytes() if result is None else result.storage_bytes
                    storage = self._new_storage(size_bytes, leaf.device)
                    made[key] = self._hold(storage)
                    if real is not None:
                        self.evaluator.give(storage, real[place] if isinstance(real, (tuple, list)) else real)
                outputs.append(Recorded(self._corrected(leaf, result), made[key], self))
        self.calls[-1] = replace(
            self.calls[-1],
            outputs=tuple(self.ref(leaf) if isinstance(leaf, Recorded) else None for leaf in outputs),
            makes=tuple(hold.storage for hold in made.values()),
        )
        if isinstance(returned, (tuple, list)):
            return type(returned)(*outputs) if hasattr(returned, "_fields") else type(returned)(outputs)
        return outputs[0]

    def _append(
        self,
        func: OpOverload,
        refs: Any,
        outputs: tuple[TensorRef | None, ...] = (),
        makes: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
        profile: Profile | None = None,
        class_key: str = "",
    ) -> None:
        self.unpackings_before_call = self.unpackings
        self.calls.append(
            RecordedCall(
                target=func,
                args=tuple(refs[0]),
                kwargs=dict(refs[1]),
                outputs=outputs,
                makes=makes,
                writes=writes,
                phase=self.phase,
                module_path=self._current_path(),
                grad_enabled=torch.is_grad_enabled(),
                profile=profile,
                class_key=class_key,
            )
        )

    def _profile(self, func: OpOverload, refs: Any) -> tuple[Profile | None, str]:
        """What the call costs and returns, if it can be tried, and the name of its class."""
        args, kwargs = pytree.tree_map_only(TensorRef, lambda ref: ref.tensor, refs)
        call = Call.made(func, args, kwargs)
        if not can_be_tried(func):
            return None, call.class_key
        try:
            with torch.no_grad():
                return self.profile(call), call.class_key
        except RematchError:
            return None, call.class_key

    def _corrected(self, leaf: torch.Tensor, result: Result | None) -> torch.Tensor:
        """The fake result with the strides and the dtype of the real one."""
        if result is None or tuple(leaf.shape) != result.shape:
            return leaf
        found = (leaf.stride(), leaf.dtype, str(leaf.device))
        return leaf if found == (result.stride, getattr(torch, result.dtype), result.device) else self._fake_of(result)

    def _fake_of(self, result: Result) -> torch.Tensor:
        with self.fake_mode, torch.no_grad():
            dtype = getattr(torch, result.dtype)
            return torch.empty_strided(result.shape, result.stride, dtype=dtype, device=result.device)

    # Modules, saved tensors, values

    def _current_path(self) -> str:
        """In forward the module that runs; in backward the one whose forward made the node."""
        if self.phase is not Phase.BACKWARD:
            path = self.path[-1] if self.path else ""
            self._path_of_node.setdefault(torch.autograd._get_sequence_nr() - 1, path)  # type: ignore[attr-defined]
            return path
        node = torch._C._current_autograd_node()
        return "" if node is None else self._path_of_node.get(node._sequence_nr(), "")

    def pack(self, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, Recorded):
            return tensor
        saved = SavedTensor(self.ref(tensor), len(self.calls), self.phase)
        self.storages[saved.ref.storage].saved.append(saved)
        return _Packed(self, saved)

    def unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Packed):
            return packed
        saved = packed.saved
        saved.unpacked.append((len(self.calls), self.unpackings))
        self.unpackings += 1
        return Recorded(saved.ref.tensor, self._hold(saved.ref.storage), self)

    def read(self, tensor: Recorded) -> torch.Tensor:
        """The real data behind a tensor."""
        self.reads += 1
        self.readings = None
        return self.evaluator.value(self.ref(tensor))


class _Packed:
    """What autograd keeps of a saved tensor; tells the recorder when it lets go."""

    __slots__ = ("recorder", "saved")

    def __init__(self, recorder: Recorder, saved: SavedTensor) -> None:
        self.recorder = weakref.ref(recorder)
        self.saved = saved

    def __del__(self) -> None:
        recorder = self.recorder()
        if recorder is not None:
            self.saved.released = len(recorder.calls)


def _storage_key(leaf: Any) -> int | None:
    return int(leaf.untyped_storage()._cdata) if isinstance(leaf, torch.Tensor) else None


def _turns_in_place(func: OpOverload) -> bool:
    """Whether the operator changes how its first argument shows its storage, as `transpose_` does."""
    return torch.Tag.inplace_view in func.tags and func.overloadpacket.__name__ not in _REPLACES_STORAGE


def _turn(tensor: Recorded, fake: torch.Tensor, func: OpOverload, given: Any) -> None:
    """Give `tensor` the layout that `func` gave its fake."""
    tensor.fake = fake
    args, kwargs = given
    meta_included = torch._C._meta_in_tls_dispatch_include()  # type: ignore[attr-defined]
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        torch._C._set_meta_in_tls_dispatch_include(True)  # type: ignore[attr-defined]
        try:
            func(*args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(meta_included)  # type: ignore[attr-defined]


def _written(func: OpOverload, args: Any, kwargs: Any) -> tuple[int, ...]:
    """Storages that the call changes in place."""
    written: dict[int, None] = {}
    if func._schema.is_mutable:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                leaves = pytree.tree_leaves(value)
                written.update((leaf.hold.storage, None) for leaf in leaves if isinstance(leaf, Recorded))
    return tuple(written)


def _returned_arguments(func: OpOverload, args: Any, kwargs: Any) -> dict[int, Recorded]:
    """Results that are arguments themselves, as `add_` returns what it was called on."""
    found: dict[int, Recorded] = {}
    for place, result in enumerate(func._schema.returns):
        if result.alias_info is None or not result.alias_info.is_write:
            continue
        for index, argument in enumerate(func._schema.arguments):
            info = argument.alias_info
            if info is not None and info.is_write and info.before_set == result.alias_info.before_set:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                if isinstance(value, Recorded):
                    found[place] = value
    return found
