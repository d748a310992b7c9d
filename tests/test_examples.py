"""The programs in `examples/` and the trainers' page run as they stand."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integrations.tiny import forget_accelerate
from tests.pages import DOCS, python_blocks

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
]


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they write goes into a folder of the test."""
    monkeypatch.chdir(tmp_path)
    forget_accelerate()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Kernels this small gain nothing from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_example(name: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.slow
def test_finetuning_gpt2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("finetune_gpt2.py", monkeypatch, "--steps", "2", "--length", "32")
    assert "operators recomputed" in capsys.readouterr().out
    assert Path("finetuned/model.safetensors").exists()
    assert "Memory over time" in Path("finetuned/plan.html").read_text()


def test_llama_with_adapters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("llama_lora.py", monkeypatch, "--steps", "2", "--length", "32")
    printed = capsys.readouterr().out
    assert "operators recomputed" in printed
    assert "step 1  loss" in printed


def losses_of(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("step ")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("resnet.py", ["--seconds", "1", "--size", "32", "--budget", "3MiB"], "without recomputation\nResNet"),
        ("unet.py", ["--seconds", "1", "--channels", "4", "--size", "32"], "UNet: extra time by budget"),
        ("translation.py", ["--seconds", "2", "--lengths", "32", "24"], "length 24"),
        ("gan.py", ["--seconds", "1"], "GeneratingStep"),
    ],
)
def test_networks_of_other_kinds_train_as_without_a_budget(
    name: str, options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example(name, monkeypatch, *options)
    printed = capsys.readouterr().out
    assert said in printed
    assert "operators recomputed" in printed and "by      auto" in printed
    run_example(name, monkeypatch, *options, "--budget", "200%")
    kept = capsys.readouterr().out
    assert "by      everything kept" in kept
    assert losses_of(printed) and losses_of(printed) == losses_of(kept)


def test_planning_for_a_gpu_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("plan_without_gpu.py", monkeypatch, "--seconds", "2", "--layers", "2")
    printed = capsys.readouterr().out
    assert "operators recomputed" in printed and "H100" in printed
    assert "Memory over time" in Path("plan.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3), ids=["transformers", "lightning", "accelerate"])
def test_the_page_about_trainers(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(python_blocks(DOCS / "trainers.md")[number], {"__name__": "docs"})
    printed = capsys.readouterr().out
    assert "operators recomputed" in printed
    assert "; 0 of" not in printed


def test_the_page_about_several_devices(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = python_blocks(DOCS / "distributed.md")
    exec(block, {"__name__": "docs"})
    assert "operators recomputed" in capsys.readouterr().out
