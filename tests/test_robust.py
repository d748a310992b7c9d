"""Hostile files and arguments: one line of words and a status, never a traceback; results are never lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rematch.cli import app
from rematch.graph import Graph, Op, Value, save_graph
from rematch.graph.formats import graph_to_data
from rematch.graph.generators import chain, gpt
from rematch.planning.plan import Plan
from rematch.solvers import Problem, solve

COMMAND = [sys.executable, "-m", "rematch"]
Change = Callable[[dict[str, Any]], Any]


def rematch(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def one_line(result: Result) -> str:
    """The error, after checking that there is nothing but it and that it is safe to print."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (2, "")
    *progress, line = result.stderr.splitlines()
    assert line.isprintable()
    assert all("best" in earlier for earlier in progress)
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph and a plan of it, as files."""
    made = tmp_path_factory.mktemp("files")
    graph = chain(layers=4)
    save_graph(graph, made / "graph.json")
    problem = Problem(graph, 2**40)
    Plan.from_solution(problem, solve(problem, "noremat")).save(made / "plan.json")
    return made


def setting(*path: str | int, to: Any) -> Change:
    """Change the entry that the path leads to."""

    def change(data: dict[str, Any]) -> Any:
        place: Any = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to
        return data

    return change


RAW = {"deep": "[" * 100_000, "digits": '{"nodes": 1' + "0" * 5000 + "}"}
BENCHMARK = {"nodes": [{"id": 0, "name": "a", "time": 1, "memory": 1}], "edges": []}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RAW["deep"], "nested too deeply"),
        (RAW["digits"], "is not JSON"),
        (json.dumps({**BENCHMARK, "time_unit": []}), "time_unit should be text"),
        (json.dumps({**BENCHMARK, "order": {}}), "order should be a list"),
        ('{"nodes": [{"id": 0, "name": "a", "time": 1e999, "memory": 1}], "edges": []}', "a finite number"),
        (
            json.dumps({**BENCHMARK, "nodes": [{"id": 0, "name": "\x1b[2J\ud800", "time": 1}]}),
            r'("\u001b[2J\ud800") has',
        ),
        (json.dumps({"format": ["\x1b"], "version": 1}), r'its "format" is ["\u001b"]'),
    ],
)
@pytest.mark.parametrize("command", ["show", "solve", "check"])
def test_bad_graphs(text: str, said: str, command: str, tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text)
    args = {"show": ["show", path], "solve": ["solve", path, "--budget", "50%"]}
    assert said in one_line(rematch(*args.get(command, ["check", folder / "plan.json", path])))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (setting("timeline_bytes", 0, to=-1), "negative"),
        (setting("timeline_bytes", 0, to=2**62), "beyond"),
        (setting("timeline_bytes", 0, to=2**70), "at most 64 bits"),
        (setting("figures", "peak_bytes", to=int("9" * 400)), "at most 64 bits"),
        (setting("figures", "seconds", to=1e308 * 10), "a finite number"),
        (setting("figures", "solver", to=["\x1b[31m"]), r"\u001b[31m"),
        (setting("figures", to=None), "figures should be an object"),
        (setting("schedule", to=[10**12]), "a step is beyond"),
        (setting("graph_ops", to=-3), "negative"),
        (setting("version", to=["\n"]), r"version [\"\n\"]"),
    ],
)
def test_bad_plans(change: Change, said: str, tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "plan.json"
    data = change(json.loads((folder / "plan.json").read_text()))
    path.write_text(json.dumps(data).replace("Infinity", "1e999"))
    assert said.replace('\\"', '"') in one_line(rematch("show", path))
    one_line(rematch("check", path, folder / "graph.json"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--budget", "9" * 5000], "a budget of 5000 letters"),
        (["--budget", "90%", "--solver", "rotor", "--option", "slots=99999999999"], "solver 'rotor' failed"),
        (
            ["--budget", "90%", "--solver", "rotor", "--option", "slots=" + "9" * 5000],
            "'slots' should be a whole number",
        ),
        (["--budget", "90%", "--solver", "moccasin", "--option", "seed=99999999999"], "solver 'moccasin' failed"),
        (["--budget", "50%", "--solver", "hiremate", "--option", "executor=3"], "cannot be given as text"),
        (["--budget", "50%", "-o", "x" * 300], "file name too long"),
        (["--budget", "50%", "--solver", "a\x1b[2Jb"], r"\x1b[2J"),
    ],
)
def test_bad_arguments(args: list[str], said: str, folder: Path) -> None:
    assert said in one_line(rematch("solve", folder / "graph.json", *args))


NAMES = ["\ud800\x1b[31mred", "$\\frac{$", "a\nb\rc\u202e", "x" * 100_000, "", '\\"{}%s<&']


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_any_name_is_shown_drawn_and_written(name: str, tmp_path: Path) -> None:
    graph = Graph(
        (Op(name, 1.0, (), (0,), module_path=name), Op(f"{name}2", 1.0, (0,), (1,), module_path=name)),
        (Value(name, 10), Value(name, 20)),
        targets=frozenset({1}),
        name=name,
    )
    save_graph(graph, tmp_path / "graph.json")
    made = [tmp_path / file for file in ("plan.json", "a.dot", "a.svg")]
    solved = rematch("solve", tmp_path / "graph.json", "--budget", "100%", "--solver", "noremat", "-o", made[0])
    args = ["show", made[0], "--graph", tmp_path / "graph.json", "--dot", made[1]]
    drawn = rematch(*args, "--plot", made[2])
    for result in (solved, drawn, rematch("show", tmp_path / "graph.json")):
        assert result.exit_code == 0, result.output
        assert all(line.isprintable() for line in (result.stdout + result.stderr).split("\n"))
    assert all(path.exists() for path in made)


def test_a_plug_in_may_have_the_name_of_a_library(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "numpy.py").write_text("import numpy; numpy.zeros(3)")
    result = rematch("solve", folder / "graph.json", "--budget", "100%", "--plugin", tmp_path / "numpy.py")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("output", ["--json | true", "| head -c 1", "--json >&-", "> /dev/full"])
def test_a_plan_is_saved_whatever_happens_to_the_output(output: str, tmp_path: Path) -> None:
    if "/dev/full" in output and not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, a device that is always full: run on Linux")
    save_graph(gpt(layers=1), tmp_path / "graph.json")
    solve_it = f"{sys.executable} -m rematch solve graph.json --budget 100% --solver noremat -o plan.json"
    run = subprocess.run(
        f"{solve_it} {output}", shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=here()
    )
    assert Plan.load(tmp_path / "plan.json").graph_name == "gpt 1"
    assert "Traceback" not in run.stderr
    assert "Exception" not in run.stderr


def test_no_standard_stream_at_all(tmp_path: Path) -> None:
    run = subprocess.run(f"{sys.executable} -m rematch solvers >&- 2>&- <&-", shell=True, cwd=tmp_path, env=here())
    assert run.returncode == 0


def here() -> dict[str, str]:
    """An environment in which another folder finds this rematch too."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}


WAITING = """
import time
from rematch.graph import baseline
from rematch.solvers import Progress, Solution, Solver, Status, register

@register
class Waiting(Solver):
    name = "waiting"
    paper = ""
    def solve(self, problem, *, deadline, on_progress):
        on_progress(Progress(0.0, self.name, "waiting", best_seconds=problem.graph.baseline_seconds))
        while not deadline.expired:
            time.sleep(0.01)
        return Solution(baseline(problem.graph), Status.FEASIBLE, self.name)
"""


def test_sigterm_keeps_the_best_plan(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    args = (
        "--budget",
        "100%",
        "--plugin",
        tmp_path / "waiting.py",
        "--solver",
        "waiting",
        "-o",
        tmp_path / "plan.json",
    )
    with subprocess.Popen(
        [*COMMAND, "solve", folder / "graph.json", *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "best +0.00 %" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
    assert process.returncode == 0, said
    assert Plan.load(tmp_path / "plan.json").figures.solver == "waiting"


def test_sigterm_at_another_time_leaves_through_finally(tmp_path: Path) -> None:
    waits = "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(60)\n"
    (tmp_path / "slow.py").write_text(waits + "finally:\n    print('done', flush=True)\n")
    with subprocess.Popen(
        [*COMMAND, "solvers", "--plugin", tmp_path / "slow.py"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate()
    assert (process.returncode, rest) == (128 + signal.SIGTERM, "done\n")


def test_deep_nesting_is_refused_in_process(tmp_path: Path) -> None:
    """Data that was never a file may be nested deeper than JSON's parser goes."""
    from rematch.errors import FormatError
    from rematch.graph.formats import graph_from_json

    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(FormatError, match=r"should be an object"):
        graph_from_json({**graph_to_data(chain(layers=2)), "ops": nested}, "nested")
    while nested:  # else it is too deep to be taken apart
        nested = nested.pop()
