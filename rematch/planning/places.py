"""What CUDA's allocator, as it works here and now, needs so that every tensor of a step has a place.

`Places(device).needed_bytes(graph, schedule)`
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from rematch.capture.memory import has_expandable_segments, idle_blocks, large_segment_bytes
from rematch.graph import Graph, Schedule
from rematch.planning.cuda_allocator import LARGE_SEGMENT, Conditions, Requests, fits, least_cap, requests_of

_MODEL_ERROR = 0.01  # of what the allocator needs: cards were seen to need so much more than its model says,
_UNSEEN = 0.01  # and so much more for what a schedule does not show, such as short-lived tensors inside operators
_MARGIN = 1 + _MODEL_ERROR + _UNSEEN


def as_it_is(schedule: Schedule) -> Schedule:
    """For an engine that runs schedules so."""
    return schedule


class Places:
    """Asked about schedules as an engine runs them (`as_run`), with what the allocator has already."""

    def __init__(self, device: torch.device, as_run: Callable[[Schedule], Schedule] = as_it_is) -> None:
        self._as_run = as_run
        self._conditions = Conditions(
            expandable=has_expandable_segments(),
            segment=large_segment_bytes() or LARGE_SEGMENT,
            idle=tuple(idle_blocks(device)),
        )

    def needed_bytes(self, graph: Graph, schedule: Schedule | None) -> int:
        """What a process must be allowed to reserve."""
        assert schedule is not None
        return math.ceil(_MARGIN * least_cap(requests_of(graph, self._as_run(schedule)), self._conditions))

    def needed_for(self, requests: Requests) -> int:
        """The same for a step of which one knows all that it asks for."""
        return math.ceil((1 + _MODEL_ERROR) * least_cap(requests, self._conditions))

    def suffice_for(self, requests: Requests, cap_bytes: int) -> bool:
        """Whether a process can train by such a step that may reserve so much."""
        return fits(requests, int(cap_bytes / (1 + _MODEL_ERROR)), self._conditions)

    def suffice(self, graph: Graph, schedule: Schedule, cap_bytes: int) -> bool:
        """Whether a process can train that may reserve so much; faster to tell than what it needs."""
        return fits(requests_of(graph, self._as_run(schedule)), int(cap_bytes / _MARGIN), self._conditions)
