"""docs/formats.md: its examples are read, and it names every field that files have."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from rematch.graph import Link, Op, Value, load_graph
from rematch.planning.plan import Figures, Moved, PeakShare, Plan, Recomputed
from rematch.solvers import Progress, Status

PAGE = (Path(__file__).parent.parent / "docs" / "formats.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_graphs(example: str, tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(example, encoding="utf-8")
    loaded = load_graph(tmp_path / "graph.json")
    assert len(loaded.graph.ops) == example.count('"memory"') + example.count('"seconds"')
    assert loaded.notes == ()


@pytest.mark.parametrize("kind", [Value, Op, Link, Plan, Figures, Recomputed, PeakShare, Moved, Progress])
def test_every_field_is_named(kind: type) -> None:
    named = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert {field.name for field in fields(kind) if field.init} <= named
    assert {status.value for status in Status} <= set(re.findall(r"`([a-z ]+)`", PAGE))
