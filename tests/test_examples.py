"""The programs in `examples/` and the trainers' page run as they stand."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

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
