"""Who solves a mixed-integer program: `BACKENDS["highs"](model, deadline=Deadline(10))`.

Every backend takes what `highs.minimise` takes, but for `relaxed`, and answers with a `Minimum`. HiGHS comes with
rematch; SCIP is part of OR-Tools; Gurobi needs gurobipy and a licence. The latter two read the program from a file that
HiGHS writes, so that neither needs to know how it was built.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rematch.errors import SolverError
from rematch.solvers.base import Deadline
from rematch.solvers.common.highs import LinearModel, Minimum, minimise

_NEEDS = {"highs": "highspy", "scip": "ortools", "gurobi": "gurobipy"}


class Backend(Protocol):
    def __call__(
        self,
        model: LinearModel,
        *,
        deadline: Deadline,
        cutoff: float = math.inf,
        interrupt: Callable[[], bool] = lambda: False,
        on_bound: Callable[[float], None] = lambda bound: None,
        absolute_gap: float = 1e-6,
        start: Mapping[int, float] | None = None,
    ) -> Minimum: ...


def require_backend(name: str) -> None:
    """`SolverError` if the package of a backend is not installed."""
    if find_spec(_NEEDS[name]) is None:
        raise SolverError(f"backend {name!r} needs {_NEEDS[name]}, which is not installed; 'highs' always is")


def _minimise_with_scip(
    model: LinearModel,
    *,
    deadline: Deadline,
    cutoff: float = math.inf,
    interrupt: Callable[[], bool] = lambda: False,
    on_bound: Callable[[float], None] = lambda bound: None,
    absolute_gap: float = 1e-6,
    start: Mapping[int, float] | None = None,
) -> Minimum:
    """SCIP in OR-Tools. It has no cut-off, and neither bounds nor interrupts pass through while it runs."""
    model_builder: Any = import_module("ortools.linear_solver.python.model_builder")
    program = model_builder.Model()
    with _written(model) as path:
        program.import_from_mps_file(str(path))
    for column, value in (start or {}).items():
        program.add_hint(program.var_from_index(column), value)
    solver = model_builder.Solver("SCIP")
    solver.set_time_limit_in_seconds(max(deadline.remaining, 0.01))
    solver.set_solver_specific_parameters(f"limits/gap = 0\nlimits/absgap = {absolute_gap}")
    status, known = solver.solve(program), model_builder.SolveStatus
    if status == known.INFEASIBLE:
        return Minimum(finished=True, infeasible=True, bound=math.inf)
    if status not in (known.OPTIMAL, known.FEASIBLE):
        return Minimum(finished=False, infeasible=False, bound=-math.inf)
    objective = float(solver.objective_value)
    point = np.array([solver.value(program.var_from_index(column)) for column in range(program.num_variables)])
    bound = min(float(solver.best_objective_bound), objective)
    return Minimum(status == known.OPTIMAL, False, bound, objective, point)


def _minimise_with_gurobi(
    model: LinearModel,
    *,
    deadline: Deadline,
    cutoff: float = math.inf,
    interrupt: Callable[[], bool] = lambda: False,
    on_bound: Callable[[float], None] = lambda bound: None,
    absolute_gap: float = 1e-6,
    start: Mapping[int, float] | None = None,
) -> Minimum:
    import gurobipy
    from gurobipy import GRB

    with _written(model) as path, gurobipy.Env(params={"OutputFlag": 0}) as environment:
        program = gurobipy.read(str(path), environment)
        program.Params.TimeLimit = max(deadline.remaining, 0.01)
        program.Params.MIPGap, program.Params.MIPGapAbs = 0.0, absolute_gap
        if math.isfinite(cutoff):
            program.Params.Cutoff = cutoff
        columns = program.getVars()
        for column, value in (start or {}).items():
            columns[column].Start = value

        def look(running: Any, where: int) -> None:
            if where == GRB.Callback.MIP:
                on_bound(min(float(running.cbGet(GRB.Callback.MIP_OBJBND)), cutoff))
            if deadline.expired or interrupt():
                running.terminate()

        program.optimize(look)
        if program.Status in (GRB.INFEASIBLE, GRB.INF_OR_UNBD):
            return Minimum(True, infeasible=math.isinf(cutoff), bound=cutoff)
        if program.Status == GRB.CUTOFF:
            return Minimum(finished=True, infeasible=False, bound=cutoff)
        found = program.SolCount > 0
        objective = float(program.ObjVal) if found else math.inf
        point = np.array(program.getAttr("X", columns)) if found else None
        return Minimum(program.Status == GRB.OPTIMAL, False, min(program.ObjBound, objective, cutoff), objective, point)


@contextmanager
def _written(model: LinearModel) -> Iterator[Path]:
    """The program as an MPS file, for as long as the context lasts."""
    import highspy

    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.passModel(model.to_highs(relaxed=False))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.mps"
        highs.writeModel(str(path))
        yield path


BACKENDS: dict[str, Backend] = {"highs": minimise, "scip": _minimise_with_scip, "gurobi": _minimise_with_gurobi}
