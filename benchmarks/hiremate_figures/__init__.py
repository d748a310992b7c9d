"""The figures of HiRemate's paper, drawn from our own solvers.

    for draw in FIGURES.values():
        draw(FigureSettings(Library(Path("graphs"), "V100"), Path("results"), limit=10.0))

What methods found is kept in
`hiremate-figures.json` beside the pictures, and a figure drawn again solves only what is missing there. A budget of p %
of activations is what is resident (parameters, inputs) and p % of what the step without recomputation needs above it,
gradients among that. Tables take their graphs and budgets from here as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .ablations import draw_alphas, draw_levels
from .budgets import (
    draw_architectures,
    draw_mixer,
    draw_transformer_batches,
    draw_transformer_lengths,
    draw_unet_batches,
    draw_unet_resolutions,
)
from .depth import draw_depths
from .hierarchies import draw_hierarchies
from .ledger import FigureSettings

__all__ = ["FIGURES", "FigureSettings"]

FIGURES: dict[str, Callable[[FigureSettings], list[Path]]] = {
    "figure 4": draw_depths,
    "figure 5": draw_architectures,
    "figure 6": draw_levels,
    "figure 7": draw_hierarchies,
    "figure 10": draw_alphas,
    "figure 11": draw_transformer_batches,
    "figure 12": draw_transformer_lengths,
    "figure 13": draw_unet_batches,
    "figure 14": draw_unet_resolutions,
    "figure 15": draw_mixer,
}
