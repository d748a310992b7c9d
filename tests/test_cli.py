"""The command line, in a process of its own where that matters and in this one for the rest."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rematch import __version__
from rematch.cache import RecordFolder
from rematch.cli import app
from rematch.graph import Graph, baseline, simulate
from rematch.graph.formats import load_graph, save_graph
from rematch.graph.generators import FAMILIES, chain
from rematch.solvers import solver_names

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_solver.py"
COMMAND = [sys.executable, "-m", "rematch"]
PROMISED_KEYS = [
    "solver", "status", "budget_bytes", "peak_bytes", "baseline_peak_bytes", "seconds", "baseline_seconds",
    "overhead_pct", "lower_bound_pct", "gap_pct", "computes", "solve_seconds",
]  # fmt: skip


def rematch(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def fails_with_one_line(result: Result, status: int = 2) -> str:
    """The line on standard error, after checking that it is the only one and that nothing else happened."""
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("rematch: ")
    return line


@pytest.fixture
def graph() -> Graph:
    return chain(layers=12)


@pytest.fixture
def graph_file(graph: Graph, tmp_path: Path) -> Path:
    save_graph(graph, tmp_path / "graph.json")
    return tmp_path / "graph.json"


@pytest.fixture
def solved(graph_file: Path) -> tuple[Path, Path]:
    """A graph and a plan for it that recomputes something."""
    plan = graph_file.with_name("plan.json")
    args = ("--budget", "70%", "--plugin", EXAMPLE, "--solver", "keep-every", "-o", plan)
    run = subprocess.run([*COMMAND, "solve", graph_file, *args], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return graph_file, plan


def test_solve_prints_what_the_plan_costs(graph_file: Path) -> None:
    result = rematch("solve", graph_file, "--budget", "100%", "--solver", "noremat")
    assert result.exit_code == 0
    assert "chain 12 training" in result.stdout
    assert "optimal: no schedule is faster (any order)" in result.stdout


def test_solve_uses_the_default_solver_and_keeps_the_budget(graph: Graph, graph_file: Path) -> None:
    result = rematch("solve", graph_file, "--budget", "80%", "--time-limit", "30", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    peak_bytes = simulate(graph, baseline(graph)).peak_bytes
    assert found["budget_bytes"] == peak_bytes * 80 // 100
    assert found["peak_bytes"] <= found["budget_bytes"] < found["baseline_peak_bytes"] == peak_bytes
    assert found["overhead_pct"] == pytest.approx(100 * (found["seconds"] / found["baseline_seconds"] - 1))


def test_json_has_the_promised_keys_first(graph_file: Path) -> None:
    result = rematch("solve", graph_file, "--budget", "100%", "--solver", "noremat", "--json")
    found = json.loads(result.stdout)
    assert list(found)[: len(PROMISED_KEYS)] == PROMISED_KEYS
    assert (found["status"], found["overhead_pct"], found["gap_pct"]) == ("optimal", 0.0, 0.0)


def test_no_schedule_is_status_1_with_what_to_try_and_no_file(graph_file: Path) -> None:
    plan = graph_file.with_name("plan.json")
    args = ("solve", graph_file, "--budget", "80%", "--solver", "noremat", "-o", plan)
    assert "try a larger --budget" in fails_with_one_line(rematch(*args), status=1)
    result = rematch(*args, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["status"], found["peak_bytes"], found["gap_pct"]) == ("not found", None, None)
    assert not plan.exists()


def test_plain_reads_a_benchmark_graph_without_its_extras(tmp_path: Path) -> None:
    path = tmp_path / "benchmark.json"
    nodes = [{"id": i, "name": f"n{i}", "time": 1, "memory": 10, "workspace": w} for i, w in enumerate((-5, 8))]
    path.write_text(json.dumps({"name": "b", "nodes": nodes, "edges": [[0, 1]], "order": [0, 1], "fixed_memory": 100}))
    args = ("solve", path, "--budget", "100%", "--solver", "noremat", "--json")
    assert json.loads(rematch(*args, "--plain").stdout)["peak_bytes"] == 20
    noted = rematch(*args)
    assert json.loads(noted.stdout)["peak_bytes"] == 128
    assert "negative workspace" in noted.stderr


def test_solver_options_are_given_by_name(graph_file: Path) -> None:
    plugin = ("--plugin", EXAMPLE, "--solver", "keep-every", "--budget", "70%")
    run = [*COMMAND, "solve", graph_file, *plugin, "--option"]
    assert subprocess.run([*run, "most=9"], capture_output=True).returncode == 0
    refused = subprocess.run([*run, "most=many"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "'most' should be a whole number, not \"many\"" in refused.stderr


def test_a_saved_plan_is_shown_and_checked(solved: tuple[Path, Path]) -> None:
    graph_file, plan_file = solved
    shown = rematch("show", plan_file)
    assert shown.exit_code == 0
    assert "keep-every" in shown.stdout
    assert "layer*" in shown.stdout
    assert "holds for" in rematch("check", plan_file, graph_file).stdout


def test_check_refuses_another_graph(solved: tuple[Path, Path]) -> None:
    graph_file, plan_file = solved
    save_graph(chain(layers=11), graph_file)
    line = fails_with_one_line(rematch("check", plan_file, graph_file))
    assert "had 25 operators, 'chain 11 training' has 23" in line
    assert "--plain" in line


def test_show_describes_a_graph(graph_file: Path) -> None:
    shown = rematch("show", graph_file).stdout
    for part in ("operators  25", "forward 12, loss 1, backward 12", "peak", "no budget below it can work"):
        assert part in shown


def test_show_draws(solved: tuple[Path, Path], tmp_path: Path) -> None:
    graph_file, plan_file = solved
    result = rematch(
        "show", plan_file, "--graph", graph_file, "--plot", tmp_path / "a.svg", "--dot", tmp_path / "a.dot"
    )
    assert result.exit_code == 0, result.stderr
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.dot").read_text().startswith("digraph")


def test_a_picture_of_no_known_kind_is_refused_before_the_work(graph_file: Path, tmp_path: Path) -> None:
    line = fails_with_one_line(rematch("show", graph_file, "--plot", tmp_path / "a.gif"))
    assert "a.gif: its name should end in .png" in line


def test_alone_it_shows_its_help() -> None:
    result = rematch()
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Usage: " in result.stdout
    assert "generate" in result.stdout


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full: run on Linux"
)
def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run([*COMMAND, "solvers"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 2
    assert "rematch: cannot write to standard output: no space left on device" in run.stderr
    assert "Traceback" not in run.stderr


def test_says_its_version() -> None:
    assert rematch("--version").stdout == f"rematch {__version__}\n"


def test_drawing_a_plan_needs_its_graph(solved: tuple[Path, Path], tmp_path: Path) -> None:
    result = rematch("show", solved[1], "--plot", tmp_path / "a.png")
    assert "--graph" in fails_with_one_line(result)
    assert not (tmp_path / "a.png").exists()


def test_solvers_lists_all_with_their_papers() -> None:
    listed = rematch("solvers").stdout
    assert set(solver_names()) <= set(listed.split())
    assert "Kumar et al." in listed
    assert "(the default)" in listed


def test_a_plug_in_is_listed() -> None:
    run = subprocess.run([*COMMAND, "solvers", "--plugin", EXAMPLE], capture_output=True, text=True, check=True)
    assert "keep-every" in run.stdout
    assert "most=50" in run.stdout


@pytest.mark.parametrize("family", FAMILIES)
def test_generates_every_family(family: str, tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    result = rematch("generate", family, "seed=3", "-o", path)
    assert result.exit_code == 0, result.stderr
    assert load_graph(path).graph == FAMILIES[family](seed=3)


def test_generate_lists_families_with_their_parameters() -> None:
    listed = rematch("generate").stdout
    assert set(FAMILIES) <= set(listed.split())
    assert "layers=12" in listed


def test_demo_trains_in_half_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from rematch import demo

    small = demo.Sizes(layers=3, width=32, heads=2, batch=4, length=32, steps=3, solve_seconds=1.0)
    monkeypatch.setattr(demo, "Sizes", lambda: small)
    result = rematch("demo")
    assert result.exit_code == 0, result.output
    assert_matches(r"budget .* % of .* without recomputation", result.stdout)
    assert result.stdout.count(" equal\n") == small.steps
    assert "within the budget" in result.stdout


def test_demo_fails_where_training_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rematch.demo.run_demo", lambda say: False)
    result = rematch("demo")
    assert result.exit_code == 1
    assert "please report this" in result.stderr


def test_cache_lists_plans_and_costs_and_forgets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path))
    folder: RecordFolder[int] = RecordFolder("plans", decode=int)
    folder.put("a key", 3, label="Net, 12 operators")
    (tmp_path / "costs-cpu.json").write_text("{}")
    (tmp_path / "links.json").write_text("{}")
    (tmp_path / "plans" / "notes.txt").write_text("not ours")
    assert_matches(
        r"3 files, .*\n +plan .* just now +Net, 12 operators\n +costs .* cpu\n +links .* host", rematch("cache").stdout
    )
    rows = json.loads(rematch("cache", "--json").stdout)["files"]
    assert [row["kind"] for row in rows] == ["plan", "costs", "links"]
    assert "deleted" in rematch("cache", "--clear").stdout
    assert json.loads(rematch("cache", "--json").stdout)["files"] == []
    assert (tmp_path / "plans" / "notes.txt").exists()


def test_the_doctor_names_versions_solvers_and_devices() -> None:
    result = rematch("doctor", "--quick")
    assert result.exit_code == 0, result.output
    for part in (
        f"rematch      {__version__}",
        "python",
        "torch",
        "highspy",
        "solvers",
        "auto by default",
        "cpu",
        "costs",
    ):
        assert part in result.stdout
    assert "FAILED" not in result.stdout


def test_the_doctor_tries_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr("rematch.doctor._plan_a_graph", lambda: tried.append("plan") or "done")
    monkeypatch.setattr("rematch.doctor._train_a_module", lambda: tried.append("train") or "done")
    result = rematch("doctor")
    assert (result.exit_code, tried) == (0, ["plan", "train"])

    def broken() -> str:
        raise RuntimeError("no kernel")

    monkeypatch.setattr("rematch.doctor._train_a_module", broken)
    result = rematch("doctor")
    assert result.exit_code == 1
    assert "training     FAILED: RuntimeError: no kernel" in result.stdout
    assert "planning     ok" in result.stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("rematch sol", "solve"),
        ("rematch solve g.json --solver mocc", "moccasin"),
        ("rematch generate gp", "gpt"),
        ("rematch memory m:f --device h2", "h200"),
    ],
)
def test_the_shell_completes_commands_solvers_and_families(words: str, found: str) -> None:
    environment = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_REMATCH_COMPLETE": "complete_bash"}
    run = subprocess.run([*COMMAND], env={**os.environ, **environment}, capture_output=True, text=True)
    assert found in run.stdout.split(), run.stderr


def no_json(folder: Path) -> Path:
    (folder / "bad.json").write_text('{"nodes": [,]}')
    return folder / "bad.json"


def cyclic(folder: Path) -> Path:
    nodes = [{"id": i, "name": f"n{i}", "time": 1, "memory": 1} for i in range(3)]
    (folder / "bad.json").write_text(
        json.dumps({"nodes": nodes, "edges": [[0, 1], [1, 2], [2, 1]], "order": [0, 1, 2]})
    )
    return folder / "bad.json"


@pytest.mark.parametrize(
    ("bad_file", "said"),
    [
        (no_json, "bad.json is not JSON: .* line 1, column 12"),
        (cyclic, "bad.json.* cycle: 'n"),
        (lambda folder: folder / "missing.json", "missing.json: no such file"),
        (lambda folder: folder, "is a directory"),
    ],
)
def test_a_bad_graph_is_one_line(bad_file: Any, said: str, tmp_path: Path) -> None:
    path = bad_file(tmp_path)
    assert_matches(said, fails_with_one_line(rematch("solve", path, "--budget", "50%")))
    assert_matches(said, fails_with_one_line(rematch("show", path)))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--budget", "50%", "--solver", "gredy"], "unknown solver 'gredy'; did you mean 'greedy'"),
        (["--budget", "lots"], "'lots' cannot be read; write it like"),
        (["--budget", "10KiB"], "'layer.*' alone holds .* the lowest budget that can work is [0-9]+ bytes"),
        (["--budget", "50%", "--time-limit", "-1"], "--time-limit -1 is not possible"),
        (["--budget", "50%", "--time-limit", "nan"], "--time-limit nan is not possible"),
        (["--budget", "50%", "--option", "seed"], "'seed' is not of the form KEY=VALUE"),
        (["--budget", "50%", "--solver", "noremat", "--option", "x=1"], "of solver 'noremat' 'x'; known: none"),
        (["--budget", "50%", "-o", "missing/plan.json"], "cannot write missing/plan.json: .* no such file"),
        (["--budget", "50%", "-o", "."], "it is a folder"),
        (["--budget", "50%", "--plugin", "missing.py"], "plug-in missing.py cannot be loaded: FileNotFoundError"),
        (["--budget", "50%", "--plugin", "graph.json"], "plug-in graph.json is not a Python file"),
        ([], "Missing option '--budget'"),
        (["--bugdet", "50%"], "No such option"),
    ],
)
def test_a_bad_argument_is_one_line(
    args: list[str], said: str, graph_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(graph_file.parent)
    before = sorted(os.listdir())
    assert_matches(said, fails_with_one_line(rematch("solve", "graph.json", *args)))
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["generate", "gtp"], "unknown family 'gtp'; did you mean 'gpt'"),
        (["generate", "gpt", "laers=3"], "unknown parameter of 'gpt' 'laers'; did you mean 'layers'"),
        (["generate", "gpt", "layers=three"], "'layers' should be a whole number, not \"three\""),
        (["generate", "gpt", "layers=0"], "layers=0 is too small"),
        (["generate", "gpt", "width=7"], "width=7 cannot be split over heads=12"),
        (["generate", "gpt", "-o", "missing/g.json"], "cannot write"),
        (["sovle"], "No such command 'sovle'"),
    ],
)
def test_other_commands_are_as_clear(args: list[str], said: str) -> None:
    assert_matches(said, fails_with_one_line(rematch(*args)))


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text


PATIENT = '''
import time
from rematch.graph import baseline
from rematch.solvers import Progress, Solution, Solver, Status, register


@register
class Patient(Solver):
    """Has a schedule at once and then waits to be stopped; a stubborn one does not stop."""

    name = "{name}"
    paper = ""

    def solve(self, problem, *, deadline, on_progress):
        on_progress(Progress(deadline.elapsed, self.name, "waiting", best_seconds=problem.graph.baseline_seconds))
        while not deadline.expired:
            time.sleep(0.01)
        print("stopped", flush=True)
        while {stubborn}:
            time.sleep(0.01)
        return Solution(baseline(problem.graph), Status.FEASIBLE, self.name)
'''


def start_waiting(graph_file: Path, *, stubborn: bool) -> subprocess.Popen[str]:
    """A `rematch solve` that has found a schedule and goes on searching."""
    plugin = graph_file.with_name("patient.py")
    plugin.write_text(PATIENT.format(name="patient", stubborn=stubborn))
    args = ("--budget", "100%", "--time-limit", "600", "--plugin", plugin, "--solver", "patient", "--json")
    process = subprocess.Popen(
        [*COMMAND, "solve", graph_file, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests may ignore it
    )
    assert process.stderr is not None
    assert "best +0.00 %" in process.stderr.readline()
    return process


def test_ctrl_c_returns_the_best_so_far(graph_file: Path) -> None:
    with start_waiting(graph_file, stubborn=False) as process:
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert json.loads(stdout.removeprefix("stopped\n"))["status"] == "feasible"


def test_a_second_ctrl_c_ends_a_search_that_does_not_listen(graph_file: Path) -> None:
    with start_waiting(graph_file, stubborn=True) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in stderr


def test_a_solver_over_budget_is_refused(graph_file: Path) -> None:
    plugin = graph_file.with_name("greedy_for_memory.py")
    impatient = PATIENT.replace("while not deadline.expired", "while False")
    plugin.write_text(impatient.format(name="glutton", stubborn=False))
    args = ("--budget", "80%", "--plugin", plugin, "--solver", "glutton", "-o", graph_file.with_name("plan.json"))
    run = subprocess.run([*COMMAND, "solve", graph_file, *args], capture_output=True, text=True)
    assert run.returncode == 2
    assert "'glutton' returned a schedule" in run.stderr
    assert "Traceback" not in run.stderr
    assert not graph_file.with_name("plan.json").exists()


def test_report_writes_a_page(solved: tuple[Path, Path], tmp_path: Path) -> None:
    graph_file, plan_file = solved
    page = tmp_path / "plan.html"
    assert "with --graph it would tell more" in rematch("report", plan_file, "-o", page).stdout
    assert "came without its graph" in page.read_text()
    assert rematch("report", plan_file, "--graph", graph_file, "-o", page).exit_code == 0
    assert "came without its graph" not in page.read_text()
    assert "cannot write" in fails_with_one_line(rematch("report", plan_file, "-o", tmp_path))
    save_graph(chain(layers=3), tmp_path / "other.json")
    assert "another graph" in fails_with_one_line(
        rematch("report", plan_file, "--graph", tmp_path / "other.json", "-o", page)
    )
