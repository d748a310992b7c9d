"""Figure 6: H-ILP on hierarchies of 3 to 9 levels; figure 10: with other weights alpha of the partition's score.

`draw_levels(FigureSettings(Library(Path("graphs"), "V100"), Path("results")))`

No search follows H-ILP here, so that the pictures show what the hierarchy alone gives.
"""

from __future__ import annotations

from pathlib import Path

from rematch.report.charts import Panel, draw_curves
from rematch.solvers.hiremate.hpartition import HPartition

from .curves import OVERHEAD, PERCENT, caption, overhead, percent, series, title
from .ledger import FigureSettings, Ledger, Row
from .methods import hilp

LEVEL_PERCENTS = (90, 80, 70, 60, 50)
CUTS = ((60, 60), (30, 30), (20, 20), (12, 10))  # most nodes on top and below; 3, 4, 6 and 9 levels
ALPHA_PERCENTS = (80, 65, 50)
ALPHAS = (0.1, 0.5, 1.0, 2.0)
ALONE = "H-ILP alone on every level: nothing is united or searched after it"
ALPHA_MODELS = {"unet": "U-Net", "transformer2": "Transformer 2-2", "mlp_mixer": "MLP-Mixer"}


def draw_levels(settings: FigureSettings) -> list[Path]:
    name = "transformer6_6"
    graph = settings.library.graph(name)
    methods = []
    for top, lower in CUTS:
        partitioner = HPartition(most_top=top, most_lower=lower)
        root = partitioner.partition(graph)
        widest = max(part.width for part in root.walk())
        methods.append(hilp(f"{root.depth} levels, at most {widest} nodes", partitioner=partitioner))
    rows = Ledger(settings).rows(name, graph, LEVEL_PERCENTS, methods)
    panels = [
        Panel(title("Transformer 6-6", rows), series(rows, percent, overhead)),
        Panel("planning", series(rows, percent, _solve_seconds), y="planning time, s"),
    ]
    path = settings.picture("figure6-levels")
    draw_curves(
        panels, path, x=PERCENT, y=OVERHEAD, title=caption(f"{ALONE}, by depth of the hierarchy", settings, rows)
    )
    return [path]


def draw_alphas(settings: FigureSettings) -> list[Path]:
    ledger, panels, drawn = Ledger(settings), [], list[Row]()
    methods = [hilp(f"alpha = {alpha:g}", partitioner=HPartition(12, 10, alpha)) for alpha in ALPHAS]
    for name, label in ALPHA_MODELS.items():
        rows = ledger.rows(name, settings.library.graph(name), ALPHA_PERCENTS, methods)
        drawn += rows
        panels.append(Panel(title(label, rows), series(rows, percent, overhead)))
    path = settings.picture("figure10-alpha")
    draw_curves(
        panels, path, x=PERCENT, y=OVERHEAD, title=caption(f"{ALONE}, by alpha of H-Partition", settings, drawn)
    )
    return [path]


def _solve_seconds(row: Row) -> float | None:
    return row.solve_seconds
