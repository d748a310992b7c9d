"""Figure 7: the hierarchies that H-Partition makes of two models.

`draw_hierarchies(FigureSettings(Library(Path("graphs"), "V100"), Path("results")))`
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rematch.report.hierarchy import draw_hierarchy
from rematch.solvers.hiremate import make_partitioner

from .ledger import FigureSettings

MODELS = {"unet": "U-Net", "transformer6_6": "Transformer 6-6"}


def draw_hierarchies(settings: FigureSettings) -> list[Path]:
    paths = []
    for name, label in MODELS.items():
        graph = replace(settings.library.graph(name), name=label)
        paths.append(settings.picture(f"figure7-{name.replace('_', '-')}"))
        draw_hierarchy(graph, make_partitioner("hpartition").partition(graph), paths[-1])
    return paths
