"""Plans for the replay engine: the traced graph with costs, what the loss takes, and a schedule from the planner.

`JointPlanner(module, planner)` is what the replay engine asks for its schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import nn
from torch.fx import GraphModule

from rematch.capture.estimate import Estimator, estimating
from rematch.capture.joint.carriers import movable_values
from rematch.capture.joint.corrections import Corrections
from rematch.capture.joint.read import Capture, Input, Layout, LossCost, read_joint, with_outside
from rematch.capture.joint.traced import device_of
from rematch.capture.measure import Measurer, measuring
from rematch.capture.memory import allocated_bytes
from rematch.graph import Schedule, simulate
from rematch.planning.host import about_link, linked
from rematch.planning.plan import Plan
from rematch.planning.planner import Planner
from rematch.planning.settings import ASSUMED_LOSS, REPLAY
from rematch.report.progress import measuring_progress

_OF_THE_MODULE = ("parameters", "buffers")


class JointPlanner:
    """Captures traced graphs of one module and has them planned."""

    def __init__(self, module: nn.Module, planner: Planner) -> None:
        self.module = module
        self.planner = planner
        self.loss: LossCost | None = None  # of a given loss, measured on the sample
        self.state_bytes = 0  # of optimizers
        self.taken: frozenset[str] = frozenset()  # parameters whose gradients hooks use up
        self.notes: tuple[str, ...] = ()  # what else plans are to say
        self._loss_output_bytes: int | None = None  # differentiable outputs of the sample
        # Of workspace and of what is retained, to the outputs. A plan that is given has counted its loss already.
        self.loss_ratios = (ASSUMED_LOSS if planner.required is None else 0.0, 0.0)
        self.corrections = Corrections()

    def capture(self, joint: GraphModule, *, forward_outputs: int, inputs: list[Input]) -> Capture:
        """The graph of a traced step, with costs and what lies outside of it."""
        device = device_of(joint)
        progress = self.planner.settings.progress
        with measuring_progress(progress) as shown, profiling(self.planner.settings.device, device, shown) as profiler:
            captured = read_joint(
                joint,
                forward_outputs=forward_outputs,
                inputs=inputs,
                profile=profiler.profile,
                corrections=self.corrections,
                unused=self.loss.unused if self.loss is not None else frozenset(),
                taken=self.taken | {name for name, p in self.module.named_parameters() if p.grad is not None},
                name=type(self.module).__name__,
            )
            captured = replace(captured, notes=(*profiler.notes, *self.notes))
        return self.with_outside(captured)

    @property
    def tangent_layouts(self) -> tuple[Layout, ...]:
        """Of a given loss, as seen on the sample; another shape has others."""
        return self.loss.tangents if self.loss is not None else ()

    def with_outside(self, captured: Capture) -> Capture:
        """The capture with the loss and what is allocated already, as far as they are known now."""
        device = device_of(captured.joint)
        gradients = {p.grad.untyped_storage()._cdata: p.grad for p in self.module.parameters() if p.grad is not None}
        outside = self.state_bytes + sum(allocated_bytes(gradient.nbytes, device) for gradient in gradients.values())
        outside += self._unused_bytes(captured, device)
        return self._with_loss(captured, self.planner.outside_bytes(captured.graph, device, outside))

    def _with_loss(self, captured: Capture, allocated: int) -> Capture:
        """The capture with the loss, and so many bytes that are allocated already."""
        loss = self._loss_of(captured.differentiable_output_bytes)
        device = device_of(captured.joint)
        # At least the loss itself, its gradient and what else is that small; where it was measured they are in it.
        retained_bytes = max(loss.retained_bytes, 4 * allocated_bytes(16, device))
        made = with_outside(captured, replace(loss, retained_bytes=retained_bytes), allocated)
        return self._with_link(made, device) if self.planner.host_bytes else made

    def _with_link(self, captured: Capture, device: torch.device) -> Capture:
        movable = movable_values(captured)
        values = tuple(replace(value, movable=index in movable) for index, value in enumerate(captured.graph.values))
        graph = replace(captured.graph, values=values)
        linked_graph = linked(graph, device, self.planner.settings.device, self.planner.host_bytes)
        return replace(captured, graph=linked_graph)

    def _unused_bytes(self, captured: Capture, device: torch.device) -> int:
        """Parameters and buffers of the module that this call does not use, and which are there all the same."""
        tensors = (*self.module.parameters(), *self.module.buffers())
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device == device}
        own_bytes = sum(allocated_bytes(storage.nbytes(), device) for storage in storages.values())
        values = captured.graph.values
        return max(0, own_bytes - sum(value.size_bytes for value in values if value.role in _OF_THE_MODULE))

    def _loss_of(self, output_bytes: int) -> LossCost:
        """What the loss takes of outputs of this size, in proportion to those it was measured on."""
        if self.loss is None:
            workspace, retained = (int(ratio * output_bytes) for ratio in self.loss_ratios)
            return LossCost(workspace, retained)
        if self._loss_output_bytes is None:
            self._loss_output_bytes = output_bytes  # a given loss is measured on the sample, which is captured first
        ratio = output_bytes / self._loss_output_bytes if self._loss_output_bytes else 1.0
        return LossCost(
            int(ratio * self.loss.workspace_bytes), int(ratio * self.loss.retained_bytes), ratio * self.loss.seconds
        )

    def schedule(self, captured: Capture) -> Schedule:
        return self.plan(captured).schedule

    def plan(self, captured: Capture) -> Plan:
        device = device_of(captured.joint)
        notes = (*captured.notes, *about_link(captured.graph, device))
        return self.planner.plan(captured.graph, device, engine=REPLAY, notes=notes)

    def loss_measured(self, captured: Capture, cost: LossCost) -> bool:
        """Take note of what the loss really takes. True if a plan no longer keeps the budget and must be made again."""
        size = captured.differentiable_output_bytes
        if self.loss is not None or not size:
            return False
        self.loss_ratios = (cost.workspace_bytes / size, cost.retained_bytes / size)
        measured = self._with_loss(captured, captured.graph.already_allocated_bytes)  # of now, some is this step's own
        budget_bytes = self.planner.budget_bytes(measured.graph, device_of(captured.joint))
        fingerprint = captured.graph.fingerprint
        known = next((plan for plan in self.planner.plans if plan.graph_fingerprint == fingerprint), None)
        return known is not None and simulate(measured.graph, known.schedule).peak_bytes > budget_bytes


def profiling(
    planned_for: str | None, device: torch.device, on_call: Callable[[str], None]
) -> AbstractContextManager[Measurer | Estimator]:
    """Costs by measurement on `device`, or by the figures of a device that is not here."""
    return measuring(device, on_call) if planned_for is None else estimating(planned_for)
