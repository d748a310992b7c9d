"""Mutated graph and plan files: every one is read or refused in words, and none takes long.

    python benchmarks/fuzz.py [--count 100000] [--seed 0] [--slow SECONDS] [--apply] [--results DIR]

A mutation changes bytes of a file, or entries of its JSON: another type, a hostile number or name, a copy, a loss. What
can be read is also described, drawn as DOT, judged by the oracle and, for plans, checked against its graph. With
`--apply`, the files are plans of a module, given to `rematch.apply`; one that is accepted must train the module as
plain training does, to the bit. Anything but a `RematchError` is a failure, and so is a file that takes longer than
`--slow` seconds of processor time; a plan that names no engine has its module traced, so with `--apply` more are
allowed. Failures are printed with the number that makes them again (`--only NUMBER`). Results are added to `fuzz.json`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rematch.errors import RematchError
from rematch.files import write_text
from rematch.graph import Graph, baseline, load_graph, save_graph, simulate
from rematch.graph.dot import to_dot
from rematch.graph.generators import chain, gpt, random_layered, unet
from rematch.planning.plan import Plan
from rematch.report.text import describe_graph
from rematch.solvers import Problem, solve

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 2**31, 2**63, -(2**63), 10**400,
    0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan"),
    "", "x", "\x1b[2J", "\ud800", "$\\frac{$", "a\nb", "x" * 10_000, "forward", "loss",
    [], {}, [[]], [None], {"name": "x"},
)  # fmt: skip
LETTERS = b'{}[]",:0123456789eE.-+truefalsn\\u \n\x00\xff'


def mutated(text: str, rng: random.Random) -> bytes:
    """The file with one to three changes, one time in five in its bytes and else in its JSON, which gets further."""
    if rng.random() < 0.2:
        data = bytearray(text.encode())
        for _ in range(rng.randint(1, 3)):
            change_bytes(data, rng)
        return bytes(data)
    tree = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        change_json(tree, rng)
    return json.dumps(tree).encode()


def change_bytes(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    length = rng.choice((1, 1, 1, 4, 64))
    match rng.randrange(4):
        case 0:
            data[at : at + length] = bytes(rng.choice(LETTERS) for _ in range(length))
        case 1:
            del data[at : at + length]
        case 2:
            data[at:at] = data[rng.randrange(len(data) + 1) :][:length]
        case _:
            del data[at + length * rng.randrange(100) :]


def change_json(tree: Any, rng: random.Random) -> None:
    """Walk down from the top to some entry and replace, lose, copy or swap it."""
    place = tree
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(place[key], (dict, list)) or not place[key] or rng.random() < 0.2:
            break
        place = place[key]
    match rng.randrange(4):
        case 0 | 1:
            place[key] = deepcopy(rng.choice(HOSTILE))
        case 2:
            del place[key]
        case _:
            place[key] = deepcopy(place[rng.choice(keys)])


def read_graph(path: Path, graph: Graph) -> None:
    """Everything that is done with a graph file, short of solving it."""
    found = load_graph(path).graph
    describe_graph(found)
    to_dot(found)
    simulate(found, baseline(found)).checked()


def read_plan(path: Path, graph: Graph) -> None:
    """Everything that is done with a plan file, short of running it."""
    plan = Plan.load(path)
    str(plan)
    plan.save(path)
    plan.check(graph)
    to_dot(graph, plan.schedule)


class Applied:
    """A small module, its plan, and what a plain step of it gives."""

    def __init__(self, folder: Path) -> None:
        import torch
        from torch import nn

        import rematch
        from rematch.trial import Trial, same_outcome

        torch.manual_seed(0)
        wide = [layer for _ in range(3) for layer in (nn.Linear(8, 32), nn.GELU(), nn.Dropout(), nn.Linear(32, 8))]
        module = nn.Sequential(*wide)
        self.sample = torch.randn(64, 8)
        self.plain = Trial(module, torch.sum)
        self._same_outcome = same_outcome
        plan = rematch.plan(module, self.sample, budget="80%", loss=torch.sum, time_limit=2.0, cache=False)
        plan.save(folder / "plan.json")
        self.text = (folder / "plan.json").read_text()
        assert plan.recomputed, "a plan that recomputes nothing leaves little to get wrong"

    def read(self, path: Path, _: Graph) -> None:
        """Apply the plan, and train by it if it is accepted."""
        import rematch
        from rematch.trial import Trial

        module = rematch.apply(self.plain.model, path, self.sample, loss=self.plain.loss)
        assert self._same_outcome(self.plain, Trial(module, self.plain.loss), self.sample), "trains differently"


def outcome(read: Callable[[Path, Graph], None], path: Path, graph: Graph) -> str:
    """ "read", the name of the error in words, or a traceback."""
    try:
        read(path, graph)
    except RematchError as error:
        text = str(error)
        return type(error).__name__ if text.isprintable() and len(text) < 100_000 else f"not printable: {text[:200]!r}"
    except Exception:
        return traceback.format_exc()
    return "read"


class Fuzzer:
    """Files to begin with, each with its graph, and what came of their mutations."""

    def __init__(self, folder: Path, seed: int = 0, *, applied: bool = False) -> None:
        self.path = folder / "mutated.json"
        self.seed = seed
        self.originals: list[tuple[str, Callable[[Path, Graph], None], Graph]] = []
        if applied:
            case = Applied(folder)
            self.originals.append((case.text, case.read, chain(1)))
            return
        for graph in (chain(3), gpt(1), unet(1, 1), random_layered(12)):
            save_graph(graph, self.path)
            self.originals.append((self.path.read_text(), read_graph, graph))
            problem = Problem(graph, simulate(graph, baseline(graph)).peak_bytes)
            Plan.from_solution(problem, solve(problem, "noremat")).save(self.path)
            self.originals.append((self.path.read_text(), read_plan, graph))

    def try_one(self, number: int) -> tuple[str, float]:
        """What came of mutation `number`, and in how many seconds."""
        rng = random.Random(self.seed * 1_000_003 + number)
        text, read, graph = self.originals[number % len(self.originals)]
        self.path.write_bytes(mutated(text, rng))
        started = time.process_time()
        return outcome(read, self.path, graph), time.process_time() - started


def record(arguments: argparse.Namespace, counts: Counter[str], slowest: float) -> None:
    """Add a run to those that were recorded before."""
    path = arguments.results / "fuzz.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    runs.append(
        {
            "made": date.today().isoformat(),
            "python": platform.python_version(),
            "torch": version("torch"),
            "applied": arguments.apply,
            "seed": arguments.seed,
            "files": sum(counts.values()),
            "slowest_seconds": round(slowest, 2),
            "failures": counts["FAILED"],
            "outcomes": {name: count for name, count in counts.most_common() if name != "FAILED"},
        }
    )
    write_text(path, json.dumps({"runs": runs}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow", type=float, help="seconds that a file may take; 2, with --apply 20")
    parser.add_argument("--apply", action="store_true", help="give plans of a module to rematch.apply")
    parser.add_argument("--results", type=Path, help="add what came of it to fuzz.json here")
    parser.add_argument("--only", type=int, help="try this mutation alone")
    arguments = parser.parse_args()
    slow_seconds = arguments.slow or (20.0 if arguments.apply else 2.0)
    counts: Counter[str] = Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), arguments.seed, applied=arguments.apply)
        for number in range(arguments.count) if arguments.only is None else [arguments.only]:
            found, seconds = fuzzer.try_one(number)
            slowest = max(slowest, seconds)
            failed = not found.isidentifier() or seconds > slow_seconds
            counts["FAILED" if failed else found] += 1
            if failed:
                print(f"--only {number} --seed {arguments.seed}: {seconds:.1f} s\n{found}", flush=True)
    print(f"{sum(counts.values()):,} files, the slowest {slowest:.2f} s: ", end="")
    print(", ".join(f"{name} {count:,}" for name, count in counts.most_common()))
    if arguments.results is not None:
        record(arguments, counts, slowest)
    sys.exit(counts["FAILED"] > 0)


if __name__ == "__main__":
    main()
