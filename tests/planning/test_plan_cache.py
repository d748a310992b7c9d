"""Plans of earlier starts: used without recording or solving, never trusted, and intact whatever happens."""

from __future__ import annotations

import copy
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rematch
from rematch.cache import cache_folder
from rematch.execute import runner
from rematch.execute.replay.engine import Replay
from rematch.planning import planner
from rematch.planning.plan_cache import NOTE, PlanCache
from rematch.solvers import make_solver
from tests.modules import Net, batch, mean_square
from tests.training import assert_same_steps, step_of, train

REMAT: dict[str, Any] = {"budget": "75%", "time_limit": 0.5, "progress": False}
STEP = step_of(batch(), mean_square)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds costs, which every test needs, and no plans."""
    torch.manual_seed(0)
    for file in cache_folder().glob("costs-*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path))
    monkeypatch.delenv("REMATCH_PLAN_CACHE")
    return tmp_path / "plans"


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def only_plan(module: nn.Module) -> rematch.Plan:
    (plan,) = rematch.plans_of(module)
    return plan


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing should be recorded or solved")


def forbid(monkeypatch: pytest.MonkeyPatch, *, recording: bool = True) -> None:
    monkeypatch.setattr(planner, "solve", never)
    if recording:
        monkeypatch.setattr(runner, "record", never)


@pytest.mark.parametrize("budget", ["75%", "100%"])
def test_a_second_start_neither_records_nor_solves(budget: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Net()
    options = {**REMAT, "budget": budget, "engine": "tape", "loss": mean_square}
    first = rematch.remat(copy.deepcopy(plain), batch(), **options)
    train(first, STEP)  # which holds the outputs, and so needs another plan
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    forbid(monkeypatch)
    second = rematch.remat(copy.deepcopy(plain), batch(), **options)
    ours, eager = train(second, STEP), train(copy.deepcopy(plain), STEP)
    assert_same_steps(ours, eager)
    before, after = rematch.plans_of(first)[-1], rematch.plans_of(second)[-1]
    assert after.schedule == before.schedule
    assert after.figures == before.figures
    assert NOTE in after.notes
    assert NOTE not in before.notes
    if budget != "100%":
        assert after.recomputed
        peaks = [outcome.peak_bytes for outcome in (ours[-1], eager[-1])]
        assert peaks[0] is not None and peaks[1] is not None and peaks[0] < peaks[1]


def test_a_second_start_has_the_allocator_that_its_plan_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rematch.remat(Net(), batch(), engine="tape", **REMAT)
    forbid(monkeypatch)
    asked: list[torch.device] = []
    monkeypatch.setattr(runner, "use_expandable_segments", asked.append)
    rematch.remat(Net(), batch(), engine="tape", **REMAT)
    assert asked == [torch.device("cpu")]


def test_replay_takes_its_plan_from_the_cache_and_traces_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Net()
    rematch.remat(copy.deepcopy(plain), batch(), loss=mean_square, engine="replay", **REMAT)
    forbid(monkeypatch, recording=False)
    traced: list[Any] = []
    prepare = Replay.prepare
    monkeypatch.setattr(Replay, "prepare", lambda *args, **kwargs: (traced.append(1), prepare(*args, **kwargs)))
    second = rematch.remat(copy.deepcopy(plain), batch(), loss=mean_square, engine="replay", **REMAT)
    assert not traced
    assert only_plan(second).engine == "replay"
    assert_same_steps(train(second, STEP), train(plain, STEP))
    assert traced


@pytest.mark.parametrize("off", ["argument", "environment", "solver object"])
def test_it_can_be_switched_off(off: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"argument": {"cache": False}, "solver object": {"solver": make_solver("greedy")}}
    if off == "environment":
        monkeypatch.setenv("REMATCH_PLAN_CACHE", "off")
    for _ in range(2):
        plan = rematch.plan(Net(), batch(), **REMAT, **how.get(off, {}))
        assert NOTE not in plan.notes
    assert not entries(folder)


def test_apply_asks_for_its_own_plan(folder: Path) -> None:
    plan = rematch.plan(Net(), batch(), engine="tape", cache=False, **REMAT)
    applied = rematch.apply(Net(), plan, batch())
    assert only_plan(applied).schedule == plan.schedule
    assert not entries(folder)


TURNS = {"count": [0]}


class Winding(Net):
    """Goes as many turns as a place says that no fingerprint looks at."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for _ in range(TURNS["count"][0]):
            x = self.blocks[0](x).sin()
        return super().forward(x, scale)


def test_a_plan_that_does_not_fit_the_call_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits stay eager's, and the next start has the right plan."""
    budget = {**REMAT, "budget": 450_000, "engine": "tape"}
    plain = Winding()
    rematch.remat(copy.deepcopy(plain), batch(), loss=mean_square, **budget)
    monkeypatch.setitem(TURNS, "count", [2])
    second = rematch.remat(copy.deepcopy(plain), batch(), loss=mean_square, **budget)
    assert NOTE in only_plan(second).notes
    assert_same_steps(train(second, STEP), train(copy.deepcopy(plain), STEP))
    assert len(rematch.plans_of(second)) == 2
    third = rematch.remat(copy.deepcopy(plain), batch(), loss=mean_square, **budget)
    assert NOTE not in only_plan(third).notes, "what was wrong is forgotten"
    fourth = rematch.remat(copy.deepcopy(plain), batch(), loss=mean_square, **budget)
    assert NOTE in only_plan(fourth).notes
    assert_same_steps(train(fourth, STEP), train(plain, STEP))
    assert len(rematch.plans_of(fourth)[-1].recomputed)


DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "a byte changed": lambda data: data[:-40] + b"9" + data[-39:],
    "another version": lambda data: data.replace(b'"version": 1', b'"version": 0', 1),
    "not ours": lambda data: b'{"a": 1}\n{}',
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entries_are_planned_anew(damage: str, folder: Path) -> None:
    first = rematch.plan(Net(), batch(), **REMAT)
    (entry,) = entries(folder)
    whole = entry.read_bytes()
    entry.write_bytes(DAMAGES[damage](whole))
    cache = PlanCache()
    assert cache.get(entry.stem) is None
    again = rematch.plan(Net(), batch(), **REMAT)
    assert NOTE not in again.notes
    assert again.graph_fingerprint == first.graph_fingerprint
    assert NOTE in rematch.plan(Net(), batch(), **REMAT).notes, "it was replaced by a sound one"


def test_operators_that_are_not_there_and_graphs_that_do_not_fit_are_planned_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a checksum cannot see: an entry that was written whole, and is of no use here."""
    cache = PlanCache()
    rematch.plan(Net(), batch(), **REMAT)
    get = PlanCache.get

    def changed(self: PlanCache, key: str) -> Any:
        stored = get(self, key)
        assert stored is not None
        return change(stored)

    monkeypatch.setattr(PlanCache, "get", changed)
    other_graph = rematch.trace(Net(depth=2), batch())

    def unknown_operator(stored: Any) -> Any:
        stored.tape["calls"][0] = "nobody.knows.this"
        return stored

    def no_tape(stored: Any) -> Any:
        return replace(stored, tape=None)

    def another_graph(stored: Any) -> Any:
        return replace(stored, step=replace(stored.step, graph=other_graph))

    for change in (unknown_operator, no_tape, another_graph):  # noqa: B007  # by the closure above
        assert NOTE not in rematch.plan(Net(), batch(), **REMAT).notes
    assert cache.folder.entries()[0].label.startswith("Net, ")


def test_a_plan_is_used_while_it_fits_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """With budget="auto" the budget is what the device has: less than the plan needs, or much more, is another plan."""
    free = {"bytes": 300_000}
    monkeypatch.setattr(planner, "available_bytes", lambda *_: free["bytes"])
    options = {**REMAT, "budget": "auto"}
    plan = rematch.plan(Net(), batch(), **options)
    assert plan.recomputed
    reused = {}
    for free_bytes in (301_000, 280_000, 400_000):
        free["bytes"] = free_bytes
        reused[free_bytes] = NOTE in rematch.plan(Net(), batch(), **options).notes
        free["bytes"] = 300_000
        rematch.plan(Net(), batch(), **{**options, "cache": True})
    assert reused == {301_000: True, 280_000: False, 400_000: False}


KILLED_WHILE_PLANNING = """
import os, random, signal, sys, time

import torch

torch.set_num_threads(1)  # threads would be missing after a fork
import rematch
from rematch.cache import _read_entry
from rematch.planning.plan_cache import NOTE, PlanCache
from tests.modules import Net, batch


def plan(percent):
    return rematch.plan(Net(), batch(), budget=f"{percent:.6f}%", solver="greedy", progress=False)


def plan_for_ever(seed):
    numbers = random.Random(seed)
    while True:
        plan(numbers.choice([80.0, numbers.uniform(70, 100)]))  # one that others write too, and one of its own


def files():
    return [path for path in PlanCache().folder.path.iterdir() if path.suffix == ".entry"]


def forked(work, *args):
    child = os.fork()
    if not child:
        work(*args)
        os._exit(0)
    return child


kills = int(sys.argv[1])
for percent in (80.0, 81.0):  # in children, for where PyTorch knows CUDA, none can run backward once this process has
    started = time.monotonic()
    assert os.waitpid(forked(plan, percent), 0)[1] == 0
    seconds = time.monotonic() - started
numbers = random.Random(0)
for first in range(0, kills, 2):
    children = [forked(plan_for_ever, seed) for seed in (first, first + 1)]
    before = len(files())
    while len(files()) == before:
        time.sleep(0.01)
        assert all(os.waitpid(child, os.WNOHANG) == (0, 0) for child in children)
    time.sleep(numbers.uniform(0, 2 * seconds))
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

assert NOTE in plan(80.0).notes
print(len(files()), sum(not _read_entry(path)[0] for path in files()))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, to kill processes that need not start first")
@pytest.mark.slow
def test_processes_that_are_killed_while_they_plan_leave_the_cache_intact(folder: Path) -> None:
    kills = 100
    run = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_PLANNING, str(kills)], capture_output=True, text=True, check=True
    )
    files, damaged = map(int, run.stdout.split())
    assert damaged == 0
    assert files > kills // 2, "each pair of processes should have kept some plans"
