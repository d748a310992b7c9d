"""The methods that figures compare.

`ledger.row("unet", graph, 50, hilp("alpha 2", partitioner=HPartition(alpha=2.0)))`
"""

from __future__ import annotations

from typing import Any

from .ledger import Method

CHECKMATE = Method("Checkmate's program", "checkmate")
MOCCASIN = Method("moccasin", "moccasin")
ROTOR = Method("rotor (for Rockmate)", "rotor")
TWREMAT = Method("TWRemat, pruned", "twremat")
AUTO = Method("auto (ours)", "auto", {"gap": 0.0})


def hilp(label: str, **options: Any) -> Method:
    """H-ILP alone on every level of the hierarchy; nothing is united or searched after it."""
    return Method(label, "hiremate", {"solvers": ("hilp",), "unite": False, **options})


HILP = hilp("H-ILP alone")
# The paper's framework. Our default also has local search for parts and unites results, which this leaves out.
HIREMATE = Method("HiRemate", "hiremate", {"solvers": ("hilp", "rotor", "twremat"), "unite": False})
