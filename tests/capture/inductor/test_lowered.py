"""What inductor's scheduler says of both halves of a step."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from rematch.capture.inductor.lowered import LoweredStep, lower_step
from tests.inductor_graphs import Calling, Halves, min_cut_rematerialization_partition, run_partitioned

ROWS, WIDTH = 64, 32
TENSOR = ROWS * WIDTH * 4


def lowered(module: nn.Module, sample: torch.Tensor) -> LoweredStep:
    """As torch partitions it."""
    found: list[LoweredStep] = []

    def note(gm: Any, joint_inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Halves:
        halves: Halves = min_cut_rematerialization_partition(
            gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
        )
        found.append(lower_step(*halves, returned=num_fwd_outputs))
        return halves

    run_partitioned(module, sample, Calling(note))
    return found[0]


def test_kernels_buffers_and_memory_that_is_written_over() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    step = lowered(layers, torch.randn(ROWS, WIDTH))
    products = [kernel for kernel in step.forward.kernels if kernel.library]
    (fused,) = [kernel for kernel in step.forward.kernels if not kernel.library]
    assert [step.forward.sizes[made] for kernel in products for made in kernel.makes] == [TENSOR, TENSOR]
    assert len(fused.makes) == 1 and "tanh" in fused.nodes  # what lies between tanh and gelu is in no memory
    assert step.tangents and list(step.tangents.values()) == [TENSOR]
    gradients = [kernel for kernel in step.backward.kernels if kernel.takes_over]
    assert len(gradients) == 1 and not gradients[0].library  # of tanh and gelu, over the gradient that comes in
    peaks = step.peaks(resident_bytes=1000)
    assert peaks.forward_bytes == 1000 + 3 * TENSOR
    assert peaks.at_loss_bytes == 1000 + 4 * TENSOR


def test_requests_of_a_step_are_what_its_peaks_count() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    step = lowered(layers, torch.randn(ROWS, WIDTH))
    loss_bytes = 100 * TENSOR
    alive: dict[str, int] = {}
    peaks = [0]
    written_over = {made for kernel in step.backward.kernels for made in kernel.takes_over}
    for name, size in step.requests(loss_bytes, lambda kernel: 7 if kernel.library else 0):
        assert (name in alive) == (size is None), "freed when it is there, and asked for when it is not"
        alive.pop(name, None)
        if size is not None:
            alive[name] = size
            peaks.append(sum(alive.values()))
    assert max(peaks) == step.peaks(resident_bytes=0).at_loss_bytes + loss_bytes
    without_loss = max(size for size in peaks if size < loss_bytes)
    predicted = step.peaks(resident_bytes=0, workspace=lambda kernel: 7 if kernel.library else 0)
    assert without_loss == max(predicted.forward_bytes, predicted.backward_bytes)
    assert written_over and not written_over & alive.keys()
    assert step.returned <= alive.keys()


def test_saved_copies_in_channels_last_order_are_memory_of_their_own() -> None:
    layers = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    sample = torch.randn(2, 4, 16, 16)
    step = lowered(layers, sample)
    copied = {step.forward.sizes[name] for name in step.forward.results if name is not None and name not in step.inputs}
    assert sample.nbytes in copied
    most = step.peaks(resident_bytes=0, workspace=lambda kernel: 7 if kernel.library else 0)
    assert most.backward_bytes == step.peaks(resident_bytes=0).backward_bytes + 7


def test_loops_between_library_kernels_are_one_call_on_the_cpu_and_hold_their_memory_together() -> None:
    class Normalised(nn.Module):
        """The gradient of one softmax is summed by that of the other, so each has a loop and memory of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).softmax(2).softmax(3))

    step = lowered(Normalised(), torch.randn(2, 4, 16, 16))
    for before, after in itertools.pairwise(step.backward.kernels):
        assert before.library or after.library
    activation = 2 * 8 * 16 * 16 * 4
    loops = [kernel for kernel in step.backward.kernels if not kernel.library]
    held = [[made for made in kernel.makes if step.backward.sizes[made] == activation] for kernel in loops]
    assert max(map(len, held)) > 1
