"""Whether the tape runs a plan, or replay is worth a try: what matters is how much the tape costs the host.

`reasons_for_tape(recorded, settings, budget_bytes, has_loss)`
"""

from __future__ import annotations

import torch

from rematch.capture.recorded_graph import RecordedGraph
from rematch.execute.dispatch_cost import dispatch_seconds
from rematch.execute.ranks import in_a_group
from rematch.graph import Graph, baseline, simulate
from rematch.planning.settings import REPLACE, Settings

_TAPE_HOST_COST = 3.0  # times what an empty dispatch mode costs an operator: what benchmarks/tape.py shows
_BESIDE_A_CARD = 2.0  # times that where launches wait for it: ResNet-50 on an H200 loses 40 us an operator
_HOST_SHARE = 0.05  # of a step that the tape may cost before something else is tried


def costs_the_host(operators: int, graph: Graph, device: torch.device) -> bool:
    """Whether following so many operators of forward takes a share of the step that matters."""
    seconds = operators * _TAPE_HOST_COST * dispatch_seconds()
    return seconds * (_BESIDE_A_CARD if device.type == "cuda" else 1.0) > _HOST_SHARE * graph.baseline_seconds


def reasons_for_tape(
    recorded: RecordedGraph, settings: Settings, budget_bytes: int, has_loss: bool
) -> tuple[str, ...] | None:
    """Why the tape runs this graph, as notes for its plan, which may be none; None if replay is worth a try."""
    graph, recording = recorded.graph, recorded.recording
    if settings.pins:
        return ("engine: tape, because pins name what eager runs",)
    if recording.checkpoints and settings.checkpoints != REPLACE:
        return ("engine: tape, because regions under torch.utils.checkpoint stay as they are",)
    if simulate(graph, baseline(graph)).peak_bytes <= budget_bytes:
        return ()
    if settings.device is not None or not costs_the_host(recording.forward_until, graph, recorded.device):
        return ()
    if in_a_group():
        return ("engine: tape, because gradients leave it one by one, as data parallel training needs",)
    if not has_loss:
        return ("engine: tape, because replay takes gradients as the loss gives them; see loss=",)
    if recording.asks_for_compiler:
        return ("engine: tape, because forward asks whether torch.compile traces it, and may act on that",)
    return None
