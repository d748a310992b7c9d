"""Checkmate's figure 3 (what takes memory), figure 7 (schedules of VGG19) and figure 8 (two ways to round).

    python benchmarks/checkmate_figures.py --graphs DIR [--only 3,7,8] [--limit 20] [--again] [--traced DIR]
                                           [--results DIR]

Figure 3 shows modules of `benchmarks/models`, traced with fake tensors and kept in `--traced`: what is in memory at the
peak of a training step without recomputation. The paper's sizes of batches are not all named; those here are ours.
Figure 7 shows R, what each stage computes, for the largest batches that fit 16 GiB with at most one more forward pass,
by no recomputation, by Chen's sqrt(n) and by Checkmate's own program in HiGHS. Figure 8 compares roundings of the
relaxation for 0.9 of 16 GiB, at 0.5 and at random, without our pruning. DIR holds the benchmark graphs as JSON.
Figures 7 and 8 are kept in `checkmate-figures.json` and drawn from there, unless `--again` is given.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from hiremate_figures.graphs import Library

from rematch.files import write_text
from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.graph.formats import load_graph
from rematch.graph.simulate import alive_during
from rematch.graph.transforms import with_batch
from rematch.report.figure import new_figure, save_figure
from rematch.solvers import Deadline, Problem
from rematch.solvers.checkmate.rounding import two_phase_roundings
from rematch.solvers.common.union import stages_of
from rematch.solvers.max_batch import max_batch

BUDGET = 16 * 2**30  # a V100
MODELS = {
    "resnet34": "ResNet34", "resnet101": "ResNet101", "regnet32": "RegNet32", "unet": "U-Net", "mlp_mixer": "MLP-Mixer",
    "gpt24": "GPT 24", "transformer6_6": "Transformer 6-6", "fno1d": "FNO 1d", "uno": "UNO",
}  # fmt: skip
KINDS = {"parameters and inputs": "#0072B2", "gradients of parameters": "#56B4E9", "features": "#D55E00"}
WORKSPACE = "workspace"
VGG19 = ("vgg19", 256)
FIGURE_7 = {"noremat": "no recomputation", "chen_sqrt": "Chen, sqrt(n)", "checkmate": "Checkmate's program"}
PUBLISHED_7 = {"noremat": 167, "chen_sqrt": 197, "checkmate": 289}
FIGURE_8 = {"vgg16": (256, 300), "mobilenet": (512, 512)}  # captured batch, and the one that 16 GiB are short for
SAMPLES = 60


def at_the_peak(graph: Graph) -> dict[str, int]:
    """Bytes in memory by kind when most is in memory, without recomputation."""
    plain = baseline(graph)
    seen = simulate(graph, plain)
    assert seen.peak_step is not None
    kinds = dict.fromkeys((*KINDS, WORKSPACE), 0)
    kinds["parameters and inputs"] = graph.resident_bytes
    for value, copies in alive_during(graph, plain, seen.peak_step).items():
        kind = "gradients of parameters" if value in graph.targets else "features"
        kinds[kind] += copies * graph.values[value].size_bytes
    kinds[WORKSPACE] = seen.peak_bytes - sum(kinds.values())
    return kinds


def draw_memory(arguments: argparse.Namespace) -> None:
    """Figure 3."""
    library = Library(arguments.traced, "V100")
    shares = {label: at_the_peak(library.graph(name)) for name, label in MODELS.items()}
    figure = new_figure(8.5, 4.4)
    axes = figure.subplots()
    left = np.zeros(len(shares))
    for kind, colour in {**KINDS, WORKSPACE: "#9AA3AB"}.items():
        widths = np.array([kinds[kind] / 2**30 for kinds in shares.values()])
        axes.barh(list(shares), widths, left=left, color=colour, label=kind)
        left += widths
    axes.invert_yaxis()
    axes.set_xlabel("GiB at the peak of a training step without recomputation")
    axes.set_title(
        "Figure 3, on PyTorch modules captured here at batches of ours; features are activations and their gradients",
        fontsize=9,
    )
    axes.set_xlim(0.0, 1.3 * left.max())
    axes.legend(fontsize=8, loc="lower right")
    save_figure(figure, arguments.results / "checkmate-figure3.png")
    for label, kinds in shares.items():
        print(f"{label:18} " + ", ".join(f"{kind} {size / 2**30:.2f} GiB" for kind, size in kinds.items()))


def training_graph(folder: Path, name: str, captured: int) -> Graph:
    return load_graph(folder / f"cm_{name}_b{captured}_train.json", plain=True).graph


@dataclass(frozen=True)
class Schedules:
    """Figure 7: for each solver its batch, the extra time, and (stage, operator) of all that is computed again."""

    batches: dict[str, int]
    extra: dict[str, float]
    again: dict[str, list[list[int]]]
    operators: int
    limit_seconds: float
    load_average: float


def solve_schedules(arguments: argparse.Namespace) -> Schedules:
    name, captured = VGG19
    graph = training_graph(arguments.graphs, name, captured)
    batches, extra, again = {}, {}, {}
    for solver in FIGURE_7:
        found = max_batch(graph, BUDGET, captured=captured, solver=solver, time_limit=arguments.limit)
        assert found.schedule is not None
        at = with_batch(graph, found.batch, captured=captured)
        batches[solver] = found.batch
        extra[solver] = simulate(at, found.schedule).seconds / at.baseline_seconds - 1
        again[solver] = computed_again(at, found.schedule)
    return Schedules(batches, extra, again, len(graph.ops), arguments.limit, os.getloadavg()[0])


def computed_again(graph: Graph, schedule: Schedule) -> list[list[int]]:
    """Stage and place in default order of every recomputation."""
    place = graph.arrays.position
    stages = stages_of(graph, schedule.ops)[: len(graph.ops)]
    return [[stage, int(place[op])] for stage, ops in enumerate(stages) for op in ops]


def draw_schedules(shown: Schedules, path: Path) -> None:
    """R: rows are stages, columns are operators in default order; dark for a first computation, light for another."""
    figure = new_figure(11.5, 4.6)
    for axes, (solver, label) in zip(figure.subplots(1, 3), FIGURE_7.items(), strict=True):
        computed = 2 * np.eye(shown.operators, dtype=np.int8)
        for stage, op in shown.again[solver]:
            computed[stage, op] = max(1, computed[stage, op])
        batch, extra = shown.batches[solver], shown.extra[solver]
        axes.imshow(computed, cmap="Blues", interpolation="nearest", vmin=0, vmax=2)
        axes.set(xlabel="operator", ylabel="stage")
        axes.set_title(f"{label}: batch {batch}, +{extra:.0%} (paper {PUBLISHED_7[solver]})", fontsize=8)
        print(f"{label:22} batch {batch:>4}, published {PUBLISHED_7[solver]}, extra time {extra:.1%}", flush=True)
    figure.suptitle(
        "Figure 7: R of the collected graph of VGG19 in 16 GiB, at most one more forward pass; dark: first computation,"
        f" light: again\nCheckmate's program by HiGHS; {shown.limit_seconds:g} s for each batch tried, load average"
        f" {shown.load_average:.0f} on {os.cpu_count()} cores",
        fontsize=9,
    )
    save_figure(figure, path)


Roundings = dict[str, dict[str, list[list[float]]]]  # GiB and cost relative to no recomputation, by graph and rounding


def solve_roundings(arguments: argparse.Namespace) -> Roundings:
    shown = {}
    for name, (captured, batch) in FIGURE_8.items():
        graph = with_batch(training_graph(arguments.graphs, name, captured), batch, captured=captured)
        found = two_phase_roundings(Problem(graph, BUDGET), samples=SAMPLES, deadline=Deadline(10 * arguments.limit))
        if found is None:
            raise SystemExit(
                f"the relaxation of {name} at a batch of {batch} has no solution in {10 * arguments.limit:g} s"
            )
        at_half, random = found
        shown[name] = {"at 0.5": points_of(graph, [at_half]), "at random": points_of(graph, random)}
    return shown


def draw_roundings(shown: Roundings, path: Path) -> None:
    figure = new_figure(9.5, 4.4)
    for axes, (name, points) in zip(figure.subplots(1, 2), shown.items(), strict=True):
        axes.scatter(
            *zip(*points["at random"], strict=True), s=14, color="#0072B2", label=f"at random, {SAMPLES} times"
        )
        axes.scatter(*zip(*points["at 0.5"], strict=True), s=60, marker="*", color="#D55E00", label="at 0.5")
        average = mean(cost for _, cost in points["at random"])
        axes.axhline(average, ls=":", color="#0072B2", label="mean of those at random")
        axes.axvline(BUDGET / 2**30, color="#30363C", lw=1, label="budget")
        axes.set(xlabel="peak, GiB", ylabel="cost, of no recomputation", title=f"{name}, batch {FIGURE_8[name][1]}")
        axes.legend(fontsize=7)
        print(f"{name}: at 0.5 {points['at 0.5'][0][1]:.3f}, at random {average:.3f} on average", flush=True)
    figure.suptitle(
        "Figure 8: Checkmate's relaxation (our tighter form) for 0.9 of 16 GiB, rounded in its two phases;"
        " no search, nothing pruned",
        fontsize=9,
    )
    save_figure(figure, path)


def points_of(graph: Graph, schedules: Sequence[Schedule]) -> list[list[float]]:
    seen = (simulate(graph, schedule) for schedule in schedules)
    return [[one.peak_bytes / 2**30, one.seconds / graph.baseline_seconds] for one in seen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, required=True, metavar="DIR", help="folder of benchmark graphs")
    parser.add_argument("--only", default="3,7,8", help="which figures, with commas between them")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each batch that is tried")
    parser.add_argument("--again", action="store_true", help="solve again what the results have already")
    parser.add_argument("--traced", type=Path, default=Path(__file__).parent / ".graphs", help="where graphs are kept")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    path, chosen = arguments.results / "checkmate-figures.json", arguments.only.split(",")
    kept = json.loads(path.read_text()) if path.exists() else {}

    def known(figure: str, found: Callable[[], Any]) -> Any:
        if arguments.again or figure not in kept:
            kept[figure] = found()
            write_text(path, json.dumps(kept, indent=1))
        return kept[figure]

    if "3" in chosen:
        draw_memory(arguments)
    if "7" in chosen:
        shown = known("figure 7", lambda: asdict(solve_schedules(arguments)))
        draw_schedules(Schedules(**shown), arguments.results / "checkmate-figure7.png")
    if "8" in chosen:
        draw_roundings(
            known("figure 8", lambda: solve_roundings(arguments)), arguments.results / "checkmate-figure8.png"
        )


if __name__ == "__main__":
    main()
