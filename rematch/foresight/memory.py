"""The peak of plain training: how high it is, at which operator it comes and what it is made of.

`print(rematch.memory(model, batch, loss=loss, optimizer=optimizer))`

The training step is recorded on tensors without data, so nothing is allocated and nothing runs; workspace of kernels is
estimated, not measured.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rematch.api import Loss, as_arguments, make_settings, record_step, with_checkpoints, with_chunks
from rematch.capture.devices import find_device
from rematch.errors import DeviceError
from rematch.foresight.answer import Answer
from rematch.graph import Graph, Phase, baseline, simulate
from rematch.graph.model import ALREADY_ALLOCATED
from rematch.graph.simulate import alive_during
from rematch.planning.settings import RESPECT
from rematch.records import to_json
from rematch.report.charts import draw_areas
from rematch.report.text import sparkline, table
from rematch.solvers.base import DEFAULT_SOLVER
from rematch.units import format_bytes

ACTIVATIONS, TEMPORARIES, OPTIMIZER = "activations", "temporaries", "optimizer"
_UNKNOWN_GPU = "h100"  # what stands for a card that the table of devices does not have
_MODULES_SHOWN = 10
_WHOLE = "(the model)"


@dataclass(frozen=True)
class MemoryPart:
    """How much of the peak is held by what a submodule makes in one role."""

    role: str
    module_path: str
    size_bytes: int


@dataclass(frozen=True)
class RoleTimeline:
    """Memory of one role while each operator runs."""

    role: str
    size_bytes: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Memory(Answer):
    """See the module. `parts` add up to the peak, largest first; so do `timelines` at each operator."""

    name: str
    device: str
    peak_bytes: int
    operator: str  # that runs at the peak,
    module_path: str  # in this submodule,
    phase: Phase
    position: int  # as the how-manieth, counted from 1,
    operators: int  # of so many
    parts: tuple[MemoryPart, ...]
    timelines: tuple[RoleTimeline, ...] = field(compare=False)
    notes: tuple[str, ...] = ()

    @property
    def by_role(self) -> dict[str, int]:
        """Bytes of the peak by role, largest first."""
        return _largest_first((part.role, part.size_bytes) for part in self.parts)

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes of the peak by the path of the submodule that they belong to, largest first."""
        return _largest_first((part.module_path, part.size_bytes) for part in self.parts)

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = to_json(self)
        return data

    def __str__(self) -> str:
        where = f" in {self.module_path}" if self.module_path else ""
        total = [sum(levels) for levels in zip(*(line.size_bytes for line in self.timelines), strict=True)]
        rows = [
            ("peak", format_bytes(self.peak_bytes), "of plain training, without recomputation"),
            ("at", self.operator, f"{self.phase.value}{where}, {self.position:,} of {self.operators:,} operators"),
            *((role, format_bytes(size), self._share(size)) for role, size in self.by_role.items()),
            ("memory", sparkline(total, self.peak_bytes), ""),
            *(("note", note, "") for note in self.notes),
        ]
        return "\n".join([table(f"{self.name} on {self.device}", rows), *self._modules()])

    def _modules(self) -> list[str]:
        """The submodules that hold most, those that differ in numbers only together."""
        sizes = _largest_first((re.sub(r"\d+", "*", path), size) for path, size in self.by_module.items())
        shown = list(sizes.items())[:_MODULES_SHOWN]
        lines = [
            f"    {format_bytes(size):>9}  {self._share(size):>7}  {path or '(the model)'}" for path, size in shown
        ]
        rest = sum(sizes.values()) - sum(size for _, size in shown)
        if rest:
            lines.append(f"    {format_bytes(rest):>9}  {self._share(rest):>7}  in {len(sizes) - len(shown)} others")
        return ["  by module, largest first", *lines]

    def _share(self, size_bytes: int) -> str:
        return f"{100 * size_bytes / max(1, self.peak_bytes):.1f} %"

    def plot(self, path: str | PathLike[str]) -> None:
        draw_areas(
            {line.role: line.size_bytes for line in self.timelines},
            path,
            title=f"{self.name} on {self.device}: {format_bytes(self.peak_bytes)} at {self.operator}",
            mark=self.position - 1,
        )


def memory(
    model: nn.Module,
    sample: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: bool = False,
    checkpoints: str = RESPECT,
    chunk_loss: int = 1,
    device: str | None = None,
) -> Memory:
    """Return the peak of plain training of `model` and what it is made of; nothing is run or allocated.

    sample, loss, optimizer, accumulate, checkpoints, chunk_loss: as `rematch.remat` takes them. Without `loss`, what
        it allocates is assumed.
    device: the name of a device that is not here; by default the one that the model is on.
    """
    name = device or _device_here(model, sample)
    settings = replace(make_settings("100%", DEFAULT_SOLVER, 0.0, 0, False, {}, name), accumulate=accumulate)
    settings = with_chunks(with_checkpoints(settings, checkpoints), chunk_loss)
    runner, recorded = record_step(model, sample, settings, loss=loss, optimizer=optimizer)
    return memory_of(recorded.graph, find_device(name).name, state_bytes=runner.state_bytes, notes=recorded.notes)


def memory_of(graph: Graph, device: str, *, state_bytes: int = 0, notes: tuple[str, ...] = ()) -> Memory:
    """The same of a graph; of what it has as allocated already, `state_bytes` are the optimizer's."""
    schedule = baseline(graph)
    seen = simulate(graph, schedule).checked()
    step = seen.peak_step or 0
    op = graph.ops[int(schedule.steps[step])]
    role_of = _roles(graph)
    parts: dict[tuple[str, str], int] = defaultdict(int)
    alive = alive_during(graph, schedule, step)
    for index, value in enumerate(graph.values):
        copies = 1 if value.resident else alive.get(index, 0)
        parts[role_of[index], _path_of(graph, index)] += copies * value.size_bytes
    parts[TEMPORARIES, op.module_path] += op.workspace_bytes
    if state_bytes and (ALREADY_ALLOCATED, "") in parts:
        parts[OPTIMIZER, ""] += state_bytes
        parts[ALREADY_ALLOCATED, ""] -= state_bytes
    largest = sorted(parts.items(), key=lambda part: (-part[1], part[0]))
    return Memory(
        name=graph.name,
        device=device,
        peak_bytes=seen.peak_bytes,
        operator=op.name,
        module_path=op.module_path,
        phase=op.phase,
        position=int((schedule.steps[: step + 1] >= 0).sum()),
        operators=len(graph.ops),
        parts=tuple(MemoryPart(role, path, size) for (role, path), size in largest if size),
        timelines=_timelines(graph, role_of, state_bytes),
        notes=notes,
    )


def _timelines(graph: Graph, role_of: list[str], state_bytes: int) -> tuple[RoleTimeline, ...]:
    """Memory by role while each operator of plain training runs."""
    now: dict[str, int] = dict.fromkeys([*dict.fromkeys(role_of), TEMPORARIES, OPTIMIZER], 0)
    for index, value in enumerate(graph.values):
        now[role_of[index]] += value.size_bytes if value.resident else 0
    if ALREADY_ALLOCATED in now:
        now[ALREADY_ALLOCATED] -= state_bytes
        now[OPTIMIZER] += state_bytes
    levels: dict[str, list[int]] = {role: [] for role in now}
    for step in baseline(graph).steps.tolist():
        if step < 0:
            now[role_of[~step]] -= graph.values[~step].size_bytes
            continue
        for output in graph.ops[step].outputs:
            now[role_of[output]] += graph.values[output].size_bytes
        for role, size in now.items():
            levels[role].append(size + (graph.ops[step].workspace_bytes if role == TEMPORARIES else 0))
    return tuple(RoleTimeline(role, tuple(sizes)) for role, sizes in levels.items() if any(sizes))


def _roles(graph: Graph) -> list[str]:
    """Per value what it is for: as the graph says, or kept for backward, or needed for a moment."""
    a = graph.arrays
    loss_at = len(graph.ops) if graph.loss is None else int(a.position[graph.loss])
    roles = []
    for index, value in enumerate(graph.values):
        maker = int(a.producer[index])
        uses = a.users_of(index)
        made_before = maker >= 0 and a.position[maker] < loss_at
        used_after = any(a.position[user] > loss_at for user in uses) or index in graph.targets
        roles.append(value.role or (ACTIVATIONS if made_before and used_after else TEMPORARIES))
    return roles


def _path_of(graph: Graph, value: int) -> str:
    """The submodule that a value belongs to: of a parameter that which has it, else that which made it."""
    maker = int(graph.arrays.producer[value])
    if maker >= 0:
        return graph.ops[maker].module_path
    named = graph.values[value].role in ("parameters", "buffers", "gradients")
    return graph.values[value].name.removesuffix(".grad").rpartition(".")[0] if named else ""


def _largest_first(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: dict[str, int] = defaultdict(int)
    for name, size in sizes:
        total[name] += size
    return dict(sorted(total.items(), key=lambda entry: (-entry[1], entry[0])))


def _device_here(model: nn.Module, sample: Any) -> str:
    """The name of the device that the model is on, or of one like it."""
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    leaves = pytree.tree_leaves(as_arguments(sample))
    tensors += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not any(tensor.device.type == "cuda" for tensor in tensors):
        return "cpu"
    try:
        return find_device(torch.cuda.get_device_name()).name
    except DeviceError:
        return _UNKNOWN_GPU
