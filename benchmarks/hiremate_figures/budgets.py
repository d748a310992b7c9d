"""Figure 5: extra time against budget for each architecture; figures 11 to 15: the same at other sizes of the input.

`draw_architectures(FigureSettings(Library(Path("graphs"), "V100"), Path("results")))`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rematch.graph import Graph
from rematch.report.charts import Panel, draw_curves

from .curves import GIB, OVERHEAD, PERCENT, caption, gib, overhead, percent, series, title
from .graphs import spread_percents, without_gradients
from .ledger import FigureSettings, Ledger, Method, Row
from .methods import AUTO, HILP, HIREMATE, ROTOR, TWREMAT

if TYPE_CHECKING:
    from models import Case

BUDGETS = 4  # for each curve
ARCHITECTURES = {  # by the names of the tables
    "resnet34": "ResNet34",
    "resnet101": "ResNet101",
    "unet": "U-Net",
    "mlp_mixer": "MLP-Mixer",
    "gpt5": "GPT 5",
    "gpt24": "GPT 24",
    "transformer2": "Transformer 2-2",
    "transformer6_6": "Transformer 6-6",
    "uno": "UNO",
}
WITHOUT_GRADIENTS = ("gpt5", "gpt24")  # whose gradients alone exceed most budgets, the paper's among them


def draw_architectures(settings: FigureSettings) -> list[Path]:
    graphs, labels = {}, {}
    for name, label in ARCHITECTURES.items():
        graph, counted = settings.library.graph(name), name not in WITHOUT_GRADIENTS
        key = name if counted else f"{name} without gradients"
        graphs[key] = graph if counted else without_gradients(graph)
        labels[key] = label if counted else f"{label}, gradients not counted"
    methods = (ROTOR, TWREMAT, HILP, HIREMATE, AUTO)
    panels, rows = _panels(settings, graphs, labels, methods, percent)
    path = settings.picture("figure5-budgets")
    draw_curves(panels, path, x=PERCENT, y=OVERHEAD, title=caption("Architectures", settings, rows))
    return [path]


def draw_transformer_batches(settings: FigureSettings) -> list[Path]:
    cases = {f"batch {batch}": _transformer(batch, 200) for batch in (16, 32, 64)}
    return _draw_sizes(settings, "figure11-transformer-batches", "Transformer 6-6, length 200", cases)


def draw_transformer_lengths(settings: FigureSettings) -> list[Path]:
    cases = {f"length {length}": _transformer(64, length) for length in (100, 200, 400)}
    return _draw_sizes(settings, "figure12-transformer-lengths", "Transformer 6-6, batch 64", cases)


def draw_unet_batches(settings: FigureSettings) -> list[Path]:
    cases = {f"batch {batch}": _unet(batch, 256) for batch in (16, 32, 64)}
    return _draw_sizes(settings, "figure13-unet-batches", "U-Net, 256 x 256", cases)


def draw_unet_resolutions(settings: FigureSettings) -> list[Path]:
    cases = {f"{side} x {side}": _unet(64, side) for side in (128, 256, 512)}
    return _draw_sizes(settings, "figure14-unet-resolutions", "U-Net, batch 64", cases)


def draw_mixer(settings: FigureSettings) -> list[Path]:
    from models.cases import mixer

    cases = {"batch 64": mixer("mlp_mixer_b64", depth=12, width=512, patch=16, batch=64, resolution=256)}
    return _draw_sizes(settings, "figure15-mixer", "MLP-Mixer, 256 x 256", cases)


def _transformer(batch: int, length: int) -> Case:
    from models.cases import encoder_decoder

    return encoder_decoder(f"transformer6_6_b{batch}_l{length}", 6, 512, 2048, 16, batch=batch, length=length)


def _unet(batch: int, side: int) -> Case:
    from models.cases import unet

    return unet(f"unet_b{batch}_r{side}", features=32, levels=4, batch=batch, resolution=side)


def _draw_sizes(settings: FigureSettings, name: str, text: str, cases: Mapping[str, Case]) -> list[Path]:
    graphs = {case.name: settings.library.graph_of(case) for case in cases.values()}
    labels = {case.name: label for label, case in cases.items()}
    panels, rows = _panels(settings, graphs, labels, (TWREMAT, HILP, HIREMATE, AUTO), gib)
    path = settings.picture(name)
    draw_curves(panels, path, x=GIB, y=OVERHEAD, title=caption(text, settings, rows))
    return [path]


def _panels(
    settings: FigureSettings,
    graphs: Mapping[str, Graph],
    labels: Mapping[str, str],
    methods: Sequence[Method],
    x: Callable[[Row], float],
) -> tuple[list[Panel], list[Row]]:
    """A panel for each graph, with a curve for each method, and the rows that they show."""
    ledger, panels, drawn = Ledger(settings), [], list[Row]()
    for name, graph in graphs.items():
        rows = ledger.rows(name, graph, spread_percents(graph, BUDGETS), methods)
        drawn += rows
        panels.append(Panel(title(labels[name], rows), series(rows, x, overhead)))
    return panels, drawn
