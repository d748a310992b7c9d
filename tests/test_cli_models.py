"""The commands for models: a function's module is planned, measured and asked about; errors are one line."""

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
from click.testing import Result
from typer.testing import CliRunner

import rematch as package
from rematch.cli import app
from rematch.cli.models import complete_model
from rematch.graph.formats import save_graph
from rematch.graph.generators import chain

SOURCE = """
import torch
from torch import nn

def make():
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))]
    return nn.Sequential(*layers), torch.randn(64, 32), lambda output: output.square().mean()

def without_loss():
    return nn.Linear(4, 4), torch.randn(2, 4)

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(500, 8), nn.Linear(8, 500)

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.head(self.embedding(tokens)).flatten(0, 1), tokens.flatten())

def language():
    return Language(), torch.arange(96).view(2, 48), lambda loss: loss

def alone():
    return nn.Linear(4, 4)

def broken():
    raise ValueError("no data here")

def misfit():
    return nn.Linear(4, 4), torch.randn(2, 5)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "our_models.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "our_models", raising=False)
    return tmp_path


def rematch(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def data_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["our_models:make", "our_models.py:make"])
def test_a_plan_is_printed_and_saved(name: str) -> None:
    options = ["--budget", "80%", "--device", "h200", "--time-limit", "2", "-o", "plan.json", "--report", "plan.html"]
    result = rematch("plan", name, *options)
    assert result.exit_code == 0, result.output
    saved = package.Plan.load("plan.json")
    assert str(saved) in result.stdout
    assert saved.recomputed
    assert "Memory over time" in Path("plan.html").read_text()
    found = data_of(rematch("plan", name, *options, "--json", "--solver", "greedy", "--engine", "tape"))
    assert (found["solver"], found["engine"]) == ("greedy", "tape")
    assert found["peak_bytes"] <= found["budget_bytes"] < found["baseline_peak_bytes"]


def test_pins_and_checkpoints_are_passed_on() -> None:
    options = ["--budget", "100%", "--device", "h200", "--time-limit", "1"]
    result = rematch("plan", "our_models:make", *options, "--recompute", "gelu*", "--keep", "0", "--keep", "3")
    assert result.exit_code == 0, result.output
    assert "recompute: gelu*" in result.stdout and "keep: 0, 3" in result.stdout
    refused = rematch("plan", "our_models:make", *options, "--checkpoints", "replaced")
    assert refused.exit_code == 2 and "did you mean 'replace'" in refused.stderr


def test_host_memory_is_planned_with_the_link_of_a_device_that_is_not_here() -> None:
    arguments = ["our_models.py:make", "--budget", "70%", "--device", "h200", "--offload", "1GiB", "--time-limit", "2"]
    result = rematch("plan", *arguments)
    assert result.exit_code == 0, result.output
    assert "up to 1.00 GiB of host memory, 55 GB/s out and 55 GB/s back" in " ".join(result.stdout.split())
    assert rematch("report", *arguments, "-o", "moving.html").exit_code == 0
    assert "GB/s out" in Path("moving.html").read_text()


def test_the_loss_in_slices_is_planned_and_asked_about() -> None:
    peaks = [
        data_of(rematch("memory", "our_models.py:language", "--chunk-loss", slices, "--json"))["peak_bytes"]
        for slices in ("1", "8")
    ]
    assert peaks[1] < 0.6 * peaks[0]
    arguments = ["our_models.py:language", "--budget", "100%", "--chunk-loss", "8"]
    assert "8 slices" in rematch("plan", *arguments).stdout
    assert rematch("report", *arguments, "-o", "language.html").exit_code == 0
    assert "8 slices" in Path("language.html").read_text()
    curve = data_of(rematch("pareto", "our_models.py:language", "--budgets", "2", "--chunk-loss", "8", "--json"))
    assert curve["baseline_peak_bytes"] < 0.6 * peaks[0]


def test_memory_and_pareto_are_shown_and_drawn() -> None:
    options = ["--device", "h200", "--plot", "drawn.svg", "--json"]
    used = data_of(rematch("memory", "our_models:make", *options))
    assert "activations" in Path("drawn.svg").read_text()
    curve = data_of(rematch("pareto", "our_models:make", *options, "--budgets", "2", "--time-limit", "1"))
    assert curve["baseline_peak_bytes"] == used["peak_bytes"]
    assert "no schedule is faster" in Path("drawn.svg").read_text()
    save_graph(chain(layers=4), "graph.json")
    shown = rematch("pareto", "graph.json", "--budgets", "2", "--time-limit", "1")
    assert "100.0 %  +0.00 % time" in shown.stdout


def test_a_page_is_made_from_a_model_or_a_graph() -> None:
    page, quick = Path("page.html"), ["--time-limit", "1", "-o", "page.html"]
    made = rematch("report", "our_models:make", "--budget", "80%", "--device", "h200", "--trade-off", "2", *quick)
    assert made.stdout == "page.html shows our_models:make\n", made.output
    assert "Extra time against budget" in page.read_text()
    save_graph(chain(layers=4), "graph.json")
    made = rematch("report", "graph.json", "--budget", "90%", "--solver", "greedy", *quick)
    assert made.exit_code == 0, made.output
    assert "chain 4" in page.read_text()
    assert "Extra time against budget" not in page.read_text()
    assert rematch("report", "graph.json", "--budget", "90%", "--solver", "noremat", *quick).exit_code == 1


def test_functions_that_make_models_are_completed() -> None:
    Path("broken.py").write_text("def (")
    assert complete_model("our_models.py:m") == ["our_models.py:make", "our_models.py:misfit"]
    assert "our_models.py:make" in complete_model("")
    assert complete_model("nowhere/") == []


WAITS = """
import sys, time
from rematch.solvers import Solver, make_solver, register

@register
class Waiting(Solver):
    name = "waiting"
    paper = ""
    def solve(self, problem, *, deadline, on_progress):
        found = make_solver("greedy").solve(problem, deadline=deadline, on_progress=on_progress)
        print("ready", flush=True)
        while not deadline.expired:
            time.sleep(0.01)
        return found
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_best_plan_of_a_model(number: signal.Signals) -> None:
    Path("waits.py").write_text(WAITS)
    options = ["--budget", "80%", "--plugin", "waits.py", "--solver", "waiting", "--engine", "tape", "-o", "plan.json"]
    with subprocess.Popen(
        [sys.executable, "-m", "rematch", "plan", "our_models:make", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(package.__file__).parent.parent)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests may ignore it
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        said, warned = process.communicate()
    assert process.returncode == 0, warned
    assert "a signal ended the search" in said
    assert "Traceback" not in warned
    assert package.Plan.load("plan.json").recomputed


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["plan", "our_models", "--budget", "1GB"], "'our_models' names no function; write it as package.module:funct"),
        (["plan", "our_models:mke", "--budget", "1GB"], "unknown function of our_models 'mke'; did you mean 'make'"),
        (["plan", "nowhere:make", "--budget", "1GB"], "nowhere failed: ModuleNotFoundError"),
        (["plan", "nowhere.py:make", "--budget", "1GB"], "there is no file nowhere.py"),
        (["plan", "our_models:alone", "--budget", "1GB"], r"returned a Linear; it should return \(module, sample\)"),
        (["plan", "our_models:broken", "--budget", "1GB"], "our_models:broken failed: ValueError: no data here"),
        (["memory", "our_models:misfit", "--device", "h200"], "our_models:misfit failed: RuntimeError"),
        (["memory", "our_models:make", "--device", "abacus"], "unknown device 'abacus'"),
        (["memory", "our_models:make", "--plot", "a.gif"], "its name should end in"),
        (["plan", "our_models:make", "--budget", "many"], "budget 'many' cannot be read"),
        (["plan", "our_models:make", "--budget", "1GB", "--time-limit", "0"], "--time-limit 0 is not possible"),
        (["plan", "graph.json", "--budget", "1GB"], "for graph files there is `rematch solve`"),
        (["report", "our_models:make"], "a graph or a model needs --budget"),
        (["pareto", "graph.json", "--device", "h200"], "--device is for models"),
        (["pareto", "graph.json", "--chunk-loss", "2"], "--chunk-loss is for models"),
    ],
)
def test_what_goes_wrong_is_one_line(args: list[str], said: str) -> None:
    before = sorted(os.listdir())
    result = rematch(*args)
    assert result.exit_code == 2, result.output
    *logged, line = result.stderr.splitlines()
    assert re.search(said, line), result.stderr
    assert not logged or "misfit" in args[1], "PyTorch logs kernels that refuse, and nothing else is said before"
    assert [name for name in sorted(os.listdir()) if name != "__pycache__"] == before


def test_a_model_without_a_loss_will_do() -> None:
    assert data_of(rematch("memory", "our_models:without_loss", "--device", "h200", "--json"))["peak_bytes"] > 0
