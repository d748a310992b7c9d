"""Memory budgets as people write them: "8GiB", "512MiB", "1.5GB", "80%", or plain bytes.

`parse_budget("80%", baseline_peak_bytes=1000) == 800`

A percentage is of the peak without recomputation. Budgets count everything the oracle counts, residents included.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rematch.errors import BudgetError, BudgetInfeasible
from rematch.graph import Graph
from rematch.units import format_bytes

_LARGEST_BYTES = 2**60
_MOST_LETTERS = 100
_FORMS = 'write it like "8GiB", "512MiB", "1.5GB", "80%" or 5050000000'
# The exponent has at most two digits, so that a hostile "1e999999999" is not computed.
_BUDGET = re.compile(r"(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:e\+?\d{1,2})?)\s*(?P<unit>%|[a-z]*)", re.IGNORECASE)
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_budget(budget: str | float, baseline_peak_bytes: int) -> int:
    """Return `budget` in whole bytes, rounded down; 100% is `baseline_peak_bytes`."""
    text = _text_of(budget)
    if len(text) > _MOST_LETTERS:
        raise BudgetError(f"a budget of {len(text)} letters cannot be read; {_FORMS}")
    match = _BUDGET.fullmatch(text)
    if match is None:
        raise BudgetError(f"budget {budget!r} cannot be read; {_FORMS}")
    amount = Fraction(match["number"]) * _bytes_per(match["unit"], budget, baseline_peak_bytes)
    if amount < 1:
        raise BudgetError(f"budget {budget!r} is less than one byte; {_FORMS}")
    if amount > _LARGEST_BYTES:
        raise BudgetError(f"budget {text!r} is beyond {format_bytes(_LARGEST_BYTES)}; {_FORMS}")
    return int(amount)


def parse_size(size: str | float) -> int:
    """Return an amount of memory in whole bytes, written as a budget that is not a share."""
    if is_share(size):
        raise BudgetError(f'{size!r} is a share, and there is nothing to take it of; write it like "8GiB"')
    return parse_budget(size, baseline_peak_bytes=0)


def is_share(budget: str | float) -> bool:
    """Whether a budget is a percentage."""
    return str(budget).strip().endswith("%")


def _text_of(budget: str | float) -> str:
    if isinstance(budget, int) and abs(budget) > _LARGEST_BYTES:
        return str(_LARGEST_BYTES + 1)  # Python does not write numbers of thousands of digits
    return str(budget).strip()


def _bytes_per(unit: str, budget: str | float, baseline_peak_bytes: int) -> Fraction:
    if unit == "%":
        return Fraction(baseline_peak_bytes, 100)
    if unit.lower() not in _UNITS:
        raise BudgetError(f"budget {budget!r} has an unknown unit {unit!r}; {_FORMS}")
    return Fraction(_UNITS[unit.lower()])


def require_possible(graph: Graph, budget_bytes: int) -> None:
    """Raise if the budget is below what one operator, or the values that must be alive at the end, need alone."""
    needs = [int(need) for need in graph.op_bytes]
    if needs and max(needs) > budget_bytes:
        op = needs.index(max(needs))
        raise BudgetInfeasible(
            f"budget {format_bytes(budget_bytes)} is below what one operator needs: {_op_need(graph, op)}; "
            f"{_nearest(max(needs))}"
        )
    at_end = graph.end_bytes
    if at_end > budget_bytes:
        raise BudgetInfeasible(
            f"budget {format_bytes(budget_bytes)} is below what must be alive at the end: "
            f"residents, targets and held values are {format_bytes(at_end)}; {_nearest(at_end)}"
        )


def describe_largest_need(graph: Graph) -> str:
    """Describe what no schedule can avoid: the largest operator, or all that must be alive at the end."""
    at_end = graph.end_bytes
    if not graph.ops or at_end > graph.largest_op_bytes:
        return f"Alive at the end are {format_bytes(at_end)}: parameters and other residents, gradients and outputs."
    op = int(graph.op_bytes.argmax())
    where = f" in {graph.ops[op].module_path}" if graph.ops[op].module_path else ""
    return f"Operator {_op_need(graph, op)}{where}."


def _op_need(graph: Graph, op: int) -> str:
    """`'lm_head' alone holds 5.2 GiB (inputs 0.4 GiB, outputs 1.6 GiB, ...)`, parts of nothing left out."""
    a = graph.arrays
    parts = {
        "resident": a.resident_bytes,
        "inputs": int(a.size[a.inputs_of(op)].sum()),
        "outputs": int(a.size[a.outputs_of(op)].sum()),
        "workspace": int(a.workspace[op]),
    }
    shown = ", ".join(f"{role} {format_bytes(size)}" for role, size in parts.items() if size)
    return f"{graph.ops[op].name!r} alone holds {format_bytes(int(graph.op_bytes[op]))} ({shown})"


def _nearest(lowest_bytes: int) -> str:
    return f"the lowest budget that can work is {lowest_bytes} bytes ({format_bytes(lowest_bytes)})"
