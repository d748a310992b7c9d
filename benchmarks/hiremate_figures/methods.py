"""The methods that figures compare.

`ledger.row("unet", graph, 50, hilp("alpha 2", partitioner=HPartition(alpha=2.0)))`
"""

from __future__ import annotations

from typing import Any

from .ledger import Method

CHECKMATE = Method("checkmate", "checkmate")
MOCCASIN = Method("moccasin", "moccasin")
ROTOR = Method("rotor", "rotor")
TWREMAT = Method("twremat", "twremat")
HIREMATE = Method("hiremate", "hiremate")
AUTO = Method("auto", "auto", {"gap": 0.0})


def hilp(label: str, **options: Any) -> Method:
    """The paper's H-ILP: the top level combined by the integer program, and no search after it."""
    return Method(label, "hiremate", {"polish": False, "solvers_at": {1: ("hilp",)}, **options}, alone=True)


HILP = hilp("H-ILP")
