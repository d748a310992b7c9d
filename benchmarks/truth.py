"""Bounds and schedules of the default solver against the ground truth, on thousands of tiny problems.

    python benchmarks/truth.py [--count 1000] [--seed 0] [--only NUMBER]

Problems are training steps and random graphs of up to eleven operators, with budgets between the smallest that can be
kept and the peak without recomputation; one in eight is a byte too small. Three classes: first computations in
default order, in any order, and with recomputation only after the loss, as the tape engine runs. The truth is that of
the solver `exhaustive`. `auto` uses that solver on such graphs, so the relaxation alone and `auto` without it are also
held to the truth: a bound above it, a wrong proof or an invalid schedule of any of the three is a failure. The table
counts schedules that were missed and ones that are slower than the best, by `auto` and by its other parts. The exit
status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import replace

from rematch.graph import Graph, Op, Phase, Value, baseline, simulate
from rematch.solvers import Problem, Solution, Status, solve, verify
from rematch.solvers.common.order import Order
from rematch.solvers.default.auto import Auto
from rematch.solvers.default.epochs import Epochs
from rematch.solvers.exhaustive import Exhaustive, min_budget

CLASSES = ("default order", "any order", "after the loss")
SECONDS = 5.0  # for each solve
CLOSE = 1e-7  # of the time without recomputation


def training_step(rng: random.Random) -> Graph:
    """Layers, a loss, and backwards of the layers in reverse that read what the layers made; some with extras."""
    layers = rng.randint(2, 5)
    values = [Value("weights", rng.randint(0, 2), resident=True)]
    ops: list[Op] = []

    def add(name: str, reads: set[int], phase: Phase) -> int:
        values.append(Value(name, rng.randint(0, 9)))
        once = rng.random() < 0.05
        workspace, seconds = rng.choice((0, 0, 0, 2)), float(rng.randint(0, 5))
        ops.append(Op(name, seconds, tuple(sorted(reads)), (len(values) - 1,), workspace, phase, once))
        return len(values) - 1

    made: list[int] = []
    for layer in range(layers):
        skips = {rng.choice(made)} if made and rng.random() < 0.3 else set()
        made.append(add(f"f{layer}", {0, *made[-1:], *skips}, Phase.FORWARD))
    gradient = add("loss", {made[-1]}, Phase.LOSS)
    for layer in reversed(range(layers)):
        read = made[layer if rng.random() < 0.5 else max(0, layer - 1)]
        gradient = add(f"b{layer}", {gradient, read}, Phase.BACKWARD)
    held = frozenset({rng.choice(made)}) if rng.random() < 0.3 else frozenset[int]()
    return Graph(tuple(ops), tuple(values), targets=frozenset({gradient}), held=held)


def random_graph(rng: random.Random) -> Graph:
    """Every operator reads up to three of those before it."""
    size = rng.randint(4, 10)
    reads = [tuple(sorted(rng.sample(range(i), min(i, rng.randint(1, 3))))) for i in range(size)]
    ops = tuple(Op(f"o{i}", float(rng.randint(0, 5)), reads[i], (i,)) for i in range(size))
    return Graph(ops, tuple(Value(f"v{i}", rng.randint(0, 9)) for i in range(size)))


def problem_of(number: int, seed: int, kind: str) -> Problem:
    rng = random.Random(f"{seed} {number} {kind}")
    graph = training_step(rng) if kind == "after the loss" or rng.random() < 0.5 else random_graph(rng)
    if kind == "after the loss":
        graph = replace(graph, recompute_after_loss=True)
    smallest, peak = min_budget(graph, order_of(kind)), simulate(graph, baseline(graph)).peak_bytes
    if rng.random() < 0.125:
        return Problem(graph, smallest - 1)
    return Problem(graph, rng.randint(smallest, max(smallest, peak - 1)))


def order_of(kind: str) -> Order:
    return "any" if kind == "any order" else "default"


def in_default_order(problem: Problem, solution: Solution) -> bool:
    """Published methods may find schedules in other orders, of which the truth for the default order says nothing."""
    return solution.schedule is not None and tuple(dict.fromkeys(solution.schedule.ops.tolist())) == problem.graph.order


def failures(problem: Problem, solution: Solution, truth_seconds: float | None) -> list[str]:
    """What the solution claims that is not so."""
    close = CLOSE * problem.graph.baseline_seconds
    seen = verify(problem, solution)
    bound = solution.lower_bound_seconds
    wrong: list[str] = []
    if solution.status is Status.INFEASIBLE and truth_seconds is not None:
        wrong.append("called infeasible, but is not")
    if seen is not None and in_default_order(problem, solution):
        wrong += ["better than the truth"] if truth_seconds is None or seen.seconds < truth_seconds - close else []
    if truth_seconds is not None and bound is not None and bound > truth_seconds + close:
        wrong.append(f"a bound of {bound} above {truth_seconds}")
    if truth_seconds is not None and seen is not None and solution.status is Status.OPTIMAL:
        wrong += ["called optimal, but is not"] if seen.seconds > truth_seconds + close else []
    return wrong


def check(number: int, seed: int, kind: str, counts: Counter[str]) -> list[str]:
    """Solve one problem by the relaxation, by `auto`, and by its parts for larger graphs; returns the failures."""
    problem = problem_of(number, seed, kind)
    truth = solve(problem, Exhaustive(order=order_of(kind))).lower_bound_seconds
    counts["problems"] += 1
    counts["feasible"] += truth is not None
    wrong: list[str] = []
    if kind != "any order":
        wrong += failures(problem, solve(problem, Epochs(), time_limit=SECONDS), truth)
    auto = Auto(order=order_of(kind), threads=1, iterations=20_000, gap=0.0)
    for name, solver in (("auto", auto), ("parts", replace(auto, exhaustive=False))):
        solution = solve(problem, solver, time_limit=SECONDS)
        wrong += failures(problem, solution, truth)
        if truth is not None and solution.schedule is None:
            counts[f"{name}: missed"] += 1
        elif truth is not None and solution.schedule is not None:
            seconds = simulate(problem.graph, solution.schedule).seconds
            counts[f"{name}: slower"] += seconds > truth + CLOSE * problem.graph.baseline_seconds
        counts[f"{name}: proved"] += solution.status in (Status.OPTIMAL, Status.INFEASIBLE)
    return [f"{kind}, problem {number}: {failure}" for failure in wrong]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="problems of each class")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one problem")
    arguments = parser.parse_args()
    numbers = range(arguments.count) if arguments.only is None else [arguments.only]
    each = [f"{name}: {what}" for name in ("auto", "parts") for what in ("missed", "slower", "proved")]
    columns = ("problems", "feasible", *each, "failures")
    print(f"{'class':16}" + "".join(f"{column:>15}" for column in columns) + f"{'CPU s':>8}")
    failed = False
    for kind in CLASSES:
        counts: Counter[str] = Counter()
        began = time.process_time()
        for number in numbers:
            for failure in check(number, arguments.seed, kind, counts):
                counts["failures"] += 1
                print(failure, flush=True)
        failed |= counts["failures"] > 0
        cells = "".join(f"{counts[column]:>15}" for column in columns)
        print(f"{kind:16}{cells}{time.process_time() - began:>8.0f}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
