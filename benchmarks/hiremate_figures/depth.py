"""Figure 4: extra time and solving time against depth, at half of the activations.

`draw_depths(FigureSettings(Library(Path("graphs"), "V100"), Path("results")))`

The GPTs have the width of GPT-2 small and 5,003 words: with all 50,257, logits and their gradient are more than half of
what a few layers need, and no method could keep the budget.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rematch.report.charts import Panel, draw_curves

from .curves import OVERHEAD, caption, overhead, series
from .ledger import FigureSettings, Ledger, Row
from .methods import AUTO, CHECKMATE, HILP, HIREMATE, MOCCASIN, ROTOR

if TYPE_CHECKING:
    from models import Case

SHARE_PERCENT = 50
METHODS = (CHECKMATE, MOCCASIN, ROTOR, HILP, HIREMATE, AUTO)


def draw_depths(settings: FigureSettings) -> list[Path]:
    ledger = Ledger(settings)
    families = {family: _depths(ledger, settings, cases) for family, cases in _families().items()}
    heights = {OVERHEAD: overhead, "until the search ended, s": _solve_seconds, "until its best plan, s": _best_seconds}
    panels = [
        Panel(family, series(depths, depths.__getitem__, height), y=label, logarithmic=height is not overhead)
        for label, height in heights.items()
        for family, depths in families.items()
    ]
    path = settings.picture("figure4-depth")
    rows = (row for depths in families.values() for row in depths)
    text = caption(f"Depth, at {SHARE_PERCENT} % of activations", settings, rows)
    draw_curves(panels, path, x="layers", y=OVERHEAD, columns=len(families), title=text)
    return [path]


def _families() -> dict[str, dict[int, Case]]:
    from models.cases import encoder_decoder, gpt

    return {
        "Transformer, encoders = decoders": {
            depth: encoder_decoder(f"transformer{depth}_{depth}", depth, 512, 2048, 16, batch=32, length=200)
            for depth in range(1, 7)
        },
        "GPT of 5,003 words": {
            depth: gpt(f"gpt{depth}_5003_words", depth, 768, 12, batch=100, length=20, vocabulary=5003)
            for depth in range(2, 13, 2)
        },
    }


def _depths(ledger: Ledger, settings: FigureSettings, cases: dict[int, Case]) -> dict[Row, float]:
    """What was found, and the depth of the model that it is about."""
    return {
        row: float(depth)
        for depth, case in cases.items()
        for row in ledger.rows(case.name, settings.library.graph_of(case), [SHARE_PERCENT], METHODS)
    }


def _solve_seconds(row: Row) -> float | None:
    return row.solve_seconds


def _best_seconds(row: Row) -> float | None:
    return row.seconds_to_best
