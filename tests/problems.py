"""Problems small enough to know the answer of, and that answer.

`@given(tiny_problems())`; `fewest_seconds(problem)`. Of graphs drawn with `tests.strategies.graphs` nine in ten leave
nothing to recompute: their budget is either met without or cannot be met. These are drawn towards the others.
"""

from __future__ import annotations

from hypothesis import strategies as st

from rematch.graph import Graph, Op, Phase, Schedule, Value, baseline, simulate
from rematch.solvers import Problem, Solution, Status, solve, verify
from rematch.solvers.exhaustive import Exhaustive, min_budget
from tests.strategies import graphs, plain_graphs


@st.composite
def mirror_graphs(draw: st.DrawFn, max_layers: int = 4) -> Graph:
    """Training steps: layers, a loss, and backwards of the layers in reverse that read what the layers made.

    Now and then a layer has two outputs, a workspace, is random, or runs once and changes a resident; values are held,
    or targets. One graph in three recomputes only after the loss.
    """
    layers = draw(st.integers(2, max_layers))
    values = [Value("weights", draw(st.integers(0, 2)), resident=True)]
    ops: list[Op] = []

    def add(name: str, reads: set[int], makes: int, phase: Phase) -> list[int]:
        made = list(range(len(values), len(values) + makes))
        values.extend(Value(f"{name}{slot}", draw(st.integers(0, 9))) for slot in range(makes))
        workspace, once = draw(st.sampled_from((0, 0, 0, 0, 2))), draw(_seldom)
        changes = (0,) if once and draw(st.booleans()) else ()
        seconds = float(draw(st.integers(0, 5)))
        random = draw(_seldom)
        ops.append(Op(name, seconds, tuple(sorted(reads)), tuple(made), workspace, phase, once, changes, random=random))
        return made

    made: list[list[int]] = []
    for layer in range(layers):
        reads = {0, made[-1][0]} if made else {0}
        skips = {draw(st.sampled_from(made))[-1]} if made and draw(_seldom) else set()
        made.append(add(f"f{layer}", reads | skips, draw(st.sampled_from((1, 1, 2))), Phase.FORWARD))
    gradient = add("loss", {made[-1][0]}, 1, Phase.LOSS)[0]
    gradients = [gradient]
    for layer in reversed(range(layers)):
        wanted = made[layer][-1:] if draw(st.booleans()) else made[max(0, layer - 1)][:1]
        gradient = add(f"b{layer}", {gradient, *wanted}, 1, Phase.BACKWARD)[0]
        gradients.append(gradient)
    return Graph(
        ops=tuple(ops),
        values=tuple(values),
        targets=frozenset(value for value in [*gradients, *made[0]] if draw(_seldom)),
        held=frozenset(made[draw(st.integers(0, layers - 1))]) if draw(st.booleans()) else frozenset(),
        recompute_after_loss=draw(st.sampled_from((False, False, True))),
    )


_seldom = st.sampled_from((False,) * 7 + (True,))


@st.composite
def tiny_problems(draw: st.DrawFn, max_ops: int = 8, max_layers: int = 4) -> Problem:
    """Graphs of all kinds with budgets below what they take without recomputation, one in eight just infeasible."""
    kind = draw(st.sampled_from(("mirror", "mirror", "mirror", "plain", "any")))
    graph = draw({"mirror": mirror_graphs(max_layers), "plain": plain_graphs(max_ops), "any": graphs(max_ops)}[kind])
    smallest = min_budget(graph, "default")
    if draw(_seldom):
        return Problem(graph, smallest - 1)
    return Problem(graph, draw(st.integers(smallest, max(smallest, peak_bytes(graph) - 1))))


def held_for_the_loss() -> Problem:
    """y (5) does not fit beside c (9), and nothing reads y but the loss holds it: it is best made again before that."""
    ops = (
        Op("make y", 1.0, (), (0,)),
        Op("make c", 1.0, (), (1,)),
        Op("shrink c", 1.0, (1,), (2,)),
        Op("loss", 1.0, (2,), (3,), phase=Phase.LOSS),
        Op("back", 1.0, (3,), (4,), phase=Phase.BACKWARD),
    )
    values = tuple(Value(f"v{index}", size) for index, size in enumerate((5, 9, 1, 1, 1)))
    return Problem(Graph(ops, values, held=frozenset({0})), 12)


def changed_resident() -> Problem:
    """x (5) does not fit beside y (9) and is used after the update of what it is made from: made again before that."""
    ops = (
        Op("make x", 1.0, (0,), (1,)),
        Op("make y", 1.0, (), (2,)),
        Op("shrink y", 1.0, (2,), (3,)),
        Op("update", 1.0, (3,), (), once=True, mutates=(0,)),
        Op("use x", 1.0, (1,), (4,)),
    )
    values = tuple(Value(f"v{index}", size, resident=index == 0) for index, size in enumerate((1, 5, 9, 1, 1)))
    return Problem(Graph(ops, values, targets=frozenset({4})), 12)


def peak_bytes(graph: Graph, schedule: Schedule | None = None) -> int:
    return simulate(graph, schedule or baseline(graph)).checked().peak_bytes


def fewest_seconds(problem: Problem) -> float | None:
    """The time of the fastest schedule whose first computations follow the default order; None if there is none."""
    return solve(problem, Exhaustive(order="default")).lower_bound_seconds


def check_against_truth(problem: Problem, solution: Solution) -> None:
    """What every solution in default order must satisfy, however good or bad its solver is."""
    truth = fewest_seconds(problem)
    seen = verify(problem, solution)
    close = 1e-7 * problem.graph.baseline_seconds
    if seen is None:
        assert solution.status in (Status.INFEASIBLE, Status.NOT_FOUND)
        assert solution.status is Status.NOT_FOUND or truth is None
    else:
        assert solution.status in (Status.OPTIMAL, Status.FEASIBLE)
        assert truth is not None
        assert seen.seconds >= truth - close
        assert solution.status is Status.FEASIBLE or seen.seconds <= truth + close
    if solution.lower_bound_seconds is not None and truth is not None:
        assert solution.lower_bound_seconds <= truth + close
    if solution.infeasible_up_to_bytes is not None:
        assert solution.infeasible_up_to_bytes < min_budget(problem.graph, "default")
    if solution.feasible_from_bytes is not None:
        assert solution.feasible_from_bytes >= min_budget(problem.graph, "default")
