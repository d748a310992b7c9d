"""What benchmarks on a card share: every row in a process of its own, several at once, and one that measures alone.

    arguments = options(__doc__, limit=15.0, rounds=10).parse_args()
    rows = run(Benchmark("gpu", Row, tasks, work, line, ready), arguments)

`run` starts `script --task JSON` for each task, `--jobs` at once, each with a time limit, so that a crash or a hang
costs one row. Rows are kept as JSON as they come. A run that was stopped goes on where it was, and tasks that failed
are tried again. In the worker, `run` calls `work` for that one task, prints the row and ends.

While a worker is inside `with alone():`, all other workers are stopped (SIGSTOP), also those of other benchmarks on
this machine: workers are registered in a folder that all share. Meanwhile `working_seconds`, a clock that deadlines of
solvers go by too, stands still. Workers measure the costs of operators and links alone (`measure_costs_alone`).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from rematch.files import write_text

_SHARED = Path(tempfile.gettempdir()) / "rematch-benchmarks"
_GROUPS = _SHARED / "groups"  # a file for each worker, with the name of its process group
_ALONE, _RESULTS = "alone.lock", "results.lock"
_PAUSES = _SHARED / "pauses"  # lines of a group and how many seconds it was alone
_QUEUED_SECONDS = 0.3  # in which the device works off what the others have queued
_ROW = "row: "  # what a worker prints before its row


# Alone on the machine


@contextmanager
def alone() -> Iterator[None]:
    """All other workers on this machine are stopped inside, and cached device memory is free afterwards.

    One thread of a process may use it; inside another `alone()` it changes nothing.
    """
    if _State.alone:
        yield
        return
    own = os.getpgrp()
    with _locked(_ALONE):
        _State.alone = True
        others = [group for group in _registered() if group != own]
        started = time.monotonic()
        try:
            _signal(others, signal.SIGSTOP)
            if others:
                time.sleep(_QUEUED_SECONDS)
            yield
        finally:
            _State.alone = False
            try:
                _free_cached_memory()
            finally:  # also on a device that is in error
                with _PAUSES.open("a") as pauses:
                    pauses.write(f"{own} {time.monotonic() - started}\n")
                _signal(_registered(), signal.SIGCONT)


class _State:
    alone = False
    pauses_read = 0  # bytes of the file
    paused_seconds = 0.0


def working_seconds() -> float:
    """A clock that stands still while another worker is alone."""
    try:
        size = _PAUSES.stat().st_size
    except OSError:
        size = 0
    if size > _State.pauses_read:
        with _PAUSES.open() as pauses:
            pauses.seek(_State.pauses_read)
            lines = pauses.read(size - _State.pauses_read).splitlines()
        _State.pauses_read = size
        own = os.getpgrp()
        _State.paused_seconds += sum(float(seconds) for group, seconds in map(str.split, lines) if int(group) != own)
    return time.monotonic() - _State.paused_seconds


def measure_costs_alone() -> None:
    """Have rematch measure operators and links alone, and stop its deadlines while others are.

    A recording's first unknown operator begins it, and the end of the recording, when costs are saved, ends it. Where
    all costs are known, nobody is stopped.
    """
    from rematch.capture import link
    from rematch.capture.measure import Measurer
    from rematch.execute.replay import engine
    from rematch.solvers import base

    profile, save, speeds = Measurer.profile, Measurer.save, link.measured_speeds
    held: dict[Measurer, ExitStack] = {}

    def profile_alone(self: Any, call: Any) -> Any:
        store = self._store
        if call.key not in store.records and self not in held:
            with ExitStack() as stack:
                stack.enter_context(alone())
                store._saved = store._load()  # what others measured while we waited
                store.records = {**store._saved, **store.records}
                if call.key not in store.records:
                    held[self] = stack.pop_all()
        return profile(self, call)

    def save_alone(self: Any) -> None:
        with held.pop(self, ExitStack()):
            save(self)

    def speeds_alone(device: Any) -> Any:
        with alone():
            return speeds(device)

    Measurer.profile, Measurer.save = profile_alone, save_alone  # type: ignore[method-assign]
    link.measured_speeds = speeds_alone
    base.time = SimpleNamespace(monotonic=working_seconds)  # type: ignore[assignment]
    engine.time = SimpleNamespace(perf_counter=working_seconds)  # type: ignore[attr-defined]


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Until the end of the block, or of the process, nobody else has the lock of this name."""
    _GROUPS.mkdir(parents=True, exist_ok=True)
    with (_SHARED / name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _registered() -> list[int]:
    """Process groups of the workers that are alive; what dead ones left is removed."""
    found = []
    for path in _GROUPS.iterdir():
        with suppress(OSError, ValueError):
            group = int(path.name)
            if path.read_text() == _born(group):  # else the number is another's by now
                found.append(group)
            else:
                path.unlink()
    return found


def _born(group: int) -> str:
    with suppress(psutil.Error):
        return str(psutil.Process(group).create_time())
    return "never"


def _signal(groups: Iterable[int], number: int) -> None:
    for group in groups:
        with suppress(OSError):  # it has ended, or is not ours
            os.killpg(group, number)


def _let_all_go_on() -> None:
    """After a worker that ended while it was alone; nobody is now."""
    with _locked(_ALONE):
        _signal(_registered(), signal.SIGCONT)


def _free_cached_memory() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# Tasks and rows


@dataclass(frozen=True)
class Task:
    """One row to measure; `budget` is in bytes, where there is one."""

    model: str
    method: str
    point: str = ""
    budget: int | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.method, self.point


@dataclass(frozen=True)
class Row:
    """What all rows have; benchmarks add to it, everything with a default, so that older files can be read."""

    model: str = ""
    method: str = ""
    point: str = ""
    failure: str | None = None
    date: str = ""
    budget_mib: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.method, self.point


Ready = Callable[[Task, "list[Any]", "set[tuple[str, str, str]]"], "Task | None"]


@dataclass(frozen=True)
class Benchmark:
    """What to measure, in this order, and how.

    `ready` is given a task, the rows there are and the keys of those still to come. It returns the task, perhaps with a
    budget that follows from a row, or None as long as what it needs is not there.
    """

    name: str  # of the files with rows and with what workers write to stderr
    row: type[Any]
    tasks: list[Task]
    work: Callable[[Task, argparse.Namespace], Any]
    line: Callable[[Any], str]
    ready: Ready = lambda task, rows, to_come: task
    environment: dict[str, str] = field(default_factory=dict)


def options(description: str | None, *, limit: float, rounds: int) -> argparse.ArgumentParser:
    """The options that all benchmarks of this kind have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models, for any machine")
    parser.add_argument("--only", default="", help="regular expression on the model's name")
    parser.add_argument("--limit", type=float, default=limit, help="seconds to solve for each budget")
    parser.add_argument("--rounds", type=int, default=rounds, help="steps to time")
    parser.add_argument("--jobs", type=int, default=4, help="processes at once; one of them measures")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for the whole run; what runs then is ended")
    parser.add_argument("--point-seconds", type=float, default=600.0, help="for one row, with its pauses")
    parser.add_argument("--forget", default="", help="regular expression on the methods to measure again")
    parser.add_argument("--again", action="store_true", help="measure again what there is")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--task", help=argparse.SUPPRESS)  # of a worker
    return parser


def run(benchmark: Benchmark, arguments: argparse.Namespace) -> list[Any]:
    """Measure what is missing; returns all rows. A worker measures its task, prints the row and exits."""
    if arguments.task is not None:
        _work(benchmark, Task(**json.loads(arguments.task)), arguments)
        sys.exit()
    arguments.results.mkdir(parents=True, exist_ok=True)
    crew = Crew(benchmark, arguments)
    crew.run()
    return crew.load()


def conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    """Where and how rows were measured."""
    import torch

    import rematch

    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "versions": {
            "rematch": rematch.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "limit_seconds": arguments.limit,
        "rounds": arguments.rounds,
    }


# The worker


def _work(benchmark: Benchmark, task: Task, arguments: argparse.Namespace) -> None:
    _end_with_parent()
    with suppress(OSError):
        _State.pauses_read = _PAUSES.stat().st_size
    measure_costs_alone()
    try:
        row = benchmark.work(task, arguments)
    except Exception as error:
        traceback.print_exc()
        said = (str(error) or "-").splitlines()[0]
        row = _failed(benchmark, task, f"{type(error).__name__}: {said}")
    print(_ROW + json.dumps(asdict(row)), flush=True)


def _end_with_parent() -> None:
    """Do not work on for nobody: the parent holds the other end of our stdin."""
    if os.getpgrp() != os.getpid() or not stat.S_ISFIFO(os.fstat(0).st_mode):
        return  # called by hand

    def watch() -> None:
        while os.read(0, 1):
            pass
        _signal(_registered(), signal.SIGCONT)  # whom we may have stopped
        _signal([os.getpgrp()], signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _failed(benchmark: Benchmark, task: Task, why: str) -> Any:
    budget_mib = None if task.budget is None else task.budget / 2**20
    return benchmark.row(
        model=task.model, method=task.method, point=task.point, failure=why[:300], budget_mib=budget_mib
    )


# The parent


class Crew:
    """Runs the tasks of a benchmark in processes, several at once, and keeps their rows."""

    def __init__(self, benchmark: Benchmark, arguments: argparse.Namespace) -> None:
        self.benchmark, self.arguments = benchmark, arguments
        self.path = arguments.results / f"{benchmark.name}.json"
        self.log = arguments.results / f"{benchmark.name}.log"
        self.ends = time.monotonic() + arguments.seconds
        asked = {task.key: task for task in benchmark.tasks if re.search(arguments.only, task.model)}
        self.rows = [row for row in self.load() if row.failure is None and not self._is_asked_again(row, asked)]
        done = {row.key for row in self.rows}
        self.left = [task for key, task in asked.items() if key not in done]
        self.running: set[tuple[str, str, str]] = set()
        self.changed = threading.Condition()  # guards all of this

    def _is_asked_again(self, row: Row, asked: dict[tuple[str, str, str], Task]) -> bool:
        forget = self.arguments.forget
        return row.key in asked and (self.arguments.again or bool(forget and re.search(forget, row.method)))

    def load(self) -> list[Any]:
        """All rows in the file; those from before rows had dates have the file's."""
        if not self.path.exists():
            return []
        kept = json.loads(self.path.read_text(encoding="utf-8"))
        return [self.benchmark.row(**{"date": kept["date"], **row}) for row in kept["rows"]]

    def run(self) -> None:
        takers = [threading.Thread(target=self._take_tasks) for _ in range(self.arguments.jobs)]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join()
        for task in self.left:
            print(f"not measured: {task.model}, {task.method} {task.point}", flush=True)

    def _take_tasks(self) -> None:
        while (task := self._next()) is not None:
            row = self._result(task)
            with self.changed:
                self.running.remove(task.key)
                if row.failure is None:
                    self.rows.append(row)
                if row.failure is None or time.monotonic() < self.ends:  # else it was the end of the run that ended it
                    self._keep(row)
                print(self.benchmark.line(row), flush=True)
                self.changed.notify_all()

    def _next(self) -> Task | None:
        """The first task that is ready, now or when another has ended; None if there will be none."""
        with self.changed:
            while time.monotonic() < self.ends:
                for task in self.left:
                    to_come = self.running | {other.key for other in self.left if other is not task}
                    if (ready := self.benchmark.ready(task, self.rows, to_come)) is not None:
                        self.left.remove(task)
                        self.running.add(task.key)
                        return ready
                if not self.running:
                    return None
                self.changed.wait(1.0)
            return None

    def _result(self, task: Task) -> Any:
        """Run the task in a process of its own group, which can be stopped with all that it starts."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            with _locked(_ALONE):  # nobody starts while another is alone
                process = subprocess.Popen(
                    [sys.executable, *sys.argv, "--task", json.dumps(asdict(task))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    start_new_session=True,
                    env={**os.environ, **self.benchmark.environment},
                )
                registered = _GROUPS / str(process.pid)
                registered.write_text(_born(process.pid))
            limit = max(1.0, min(self.arguments.point_seconds, self.ends - time.monotonic()))
            watch = threading.Timer(limit, _signal, [[process.pid], signal.SIGKILL])
            watch.start()
            assert process.stdout is not None
            said = process.stdout.read().splitlines()
            process.wait()
            watch.cancel()
            registered.unlink(missing_ok=True)
            _signal([process.pid], signal.SIGKILL)  # what it started and left
            if process.returncode:
                _let_all_go_on()
            errors.seek(0)
            written = errors.read()
        with self.changed, self.log.open("a", encoding="utf-8") as log:
            log.write(f"== {date.today()} {task}\n{written}\n")
        rows = [json.loads(text.removeprefix(_ROW)) for text in said if text.startswith(_ROW)]
        if rows:
            return replace(self.benchmark.row(**rows[-1]), date=date.today().isoformat())
        last = next((text for text in reversed([*said, *written.splitlines()]) if text.strip()), "")
        why = f"exit {process.returncode} (limit {limit:.0f} s): {last}"
        return replace(_failed(self.benchmark, task, why), date=date.today().isoformat())

    def _keep(self, row: Any) -> None:
        """Put the row into the file, in the place of an older one. Another run may have written to it meanwhile."""
        with _locked(_RESULTS):
            rows = [old for old in self.load() if old.key != row.key]
            kept = {**conditions(self.arguments), "rows": [asdict(old) for old in (*rows, row)]}
            write_text(self.path, json.dumps(kept, indent=1))
