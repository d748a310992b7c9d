"""The page of the zoo: what was found for each model, as Markdown.

`written(results, ENTRIES)`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rematch.units import format_bytes

from .base import Entry
from .judge import EAGER_REFUSES, EAGER_VARIES, EQUAL, OUTCOMES, SKIPPED

_HEAD = """\
# Models that were tried

`make bench-zoo` trains small versions of public models, with random weights, and odd modules of our own: two steps in
plain PyTorch and two steps inside a memory budget, from the same seeds. It writes this page.

**{equal} of {compared} models train bit-equal within the budget.** A model is compared if plain training repeats
itself from the same seeds.

{counts}

- **equal**: losses, gradients, buffers and random states are those of plain training, bit by bit, and the measured
  peak of the second step is within the budget.
- **budget**: 60 % of the peak without recomputation if that is possible, else 80 %, else the least that
  `rematch.BudgetInfeasible` names.
- **peak**: the measured peak of the second step in per cent of the budget; **of plain**: in per cent of the measured
  peak of plain training. Parameters, gradients, buffers and inputs are part of both.
- **time**: a step against a plain step, as a ratio of CPU times on one thread; in parentheses what the plan predicted.
  These models are so small that the cost of Python for each operator, which larger models hide, is most of it.
- **planning**: seconds from the call of `rematch.remat` to its return, for all budgets that were tried, solving limited
  to {limit:g} s for each.

{versions}
"""
_COLUMNS = "| model | outcome | engine | operators | budget | peak | of plain | time | planning |"
_RULE = "|---|---|---|---:|---:|---:|---:|---:|---:|"


def written(results: Mapping[str, Mapping[str, Any]], entries: Mapping[str, Entry], limit: float) -> str:
    """The whole page, families in the order of `entries`."""
    known = {name: results[name] for name in entries if name in results}
    counts = Counter(result["outcome"] for result in known.values())
    compared = sum(counts.values()) - sum(counts[outcome] for outcome in (EAGER_VARIES, EAGER_REFUSES, SKIPPED))
    head = _HEAD.format(
        equal=counts[EQUAL],
        compared=compared,
        counts="; ".join(f"{outcome}: {counts[outcome]}" for outcome in OUTCOMES if counts[outcome]),
        versions=_versions(known),
        limit=limit,
    )
    families: dict[str, list[str]] = {}
    for name, result in known.items():
        families.setdefault(entries[name].family, []).append(_row(name, result))
    tables = [
        f"## {family.capitalize()}\n\n{_COLUMNS}\n{_RULE}\n" + "\n".join(rows) for family, rows in families.items()
    ]
    return "\n\n".join([head.rstrip(), *tables, _reasons(known)]).rstrip() + "\n"


def _row(name: str, result: Mapping[str, Any]) -> str:
    budget, peak = result.get("budget_bytes"), result.get("peak_bytes")
    cells = [
        name,
        result["outcome"],
        result.get("engine") or "",
        _text(result.get("operators")),
        "" if budget is None else f"{format_bytes(budget)} ({result['budget']})",
        _percent(peak, budget),
        _percent(peak, result.get("plain_peak_bytes")),
        _ratio(result),
        "" if result.get("planning_seconds") is None else f"{result['planning_seconds']:.1f} s",
    ]
    return "| " + " | ".join(cells) + " |"


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _percent(part: int | None, whole: int | None) -> str:
    return "" if part is None or not whole else f"{100 * part / whole:.1f} %"


def _ratio(result: Mapping[str, Any]) -> str:
    measured, predicted = result.get("time_ratio"), result.get("predicted_ratio")
    if measured is None:
        return ""
    return f"{measured:.2f}" + ("" if predicted is None else f" ({predicted:.2f})")


def _reasons(known: Mapping[str, Mapping[str, Any]]) -> str:
    told = [f"- **{name}**, {r['outcome']}: {_escaped(r['reason'])}" for name, r in known.items() if r.get("reason")]
    return "## Reasons\n\n" + "\n".join(told) if told else ""


def _escaped(text: str) -> str:
    """Words of an exception, without what Markdown would read as a tag or a table."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")


def _versions(known: Mapping[str, Mapping[str, Any]]) -> str:
    dates = sorted({result["date"] for result in known.values()})
    libraries = sorted({f"{name} {version}" for r in known.values() for name, version in r["versions"].items()})
    when = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "never"
    return f"Run {when} on CPU, one thread, with {', '.join(libraries)}."
