"""A reference: the freeze program as in the paper, solved by `scipy.optimize.linprog`.

TimelyFreeze, section 3.2.2: variables P_i and w_i, constraints [1] to [4]. A second program
that holds the makespan stands for eq. 6's small lambda.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from planner.freeze.linear_program import MAKESPAN_SLACK
from planner.ir import ActionKind, Schedule
from planner.schedule.graph import build_graph
from planner.simulation.simulate import Costs


def reference_solve(
    schedule: Schedule, upper: Costs, lower: Costs, r_max: float, *, dense: bool = True
) -> tuple[float, float]:
    """(least makespan, least sum of ratios within `MAKESPAN_SLACK` of it). Messages take `upper.communication_s`.

    Raises:
        AssertionError: linprog found no optimum.
    """
    graph = build_graph(schedule)
    actions, sink = len(graph.actions), len(graph.actions)
    longest = np.array([upper.of_action(action) for action in graph.actions])
    shortest = longest.copy()
    for node, action in enumerate(graph.actions):
        if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD):
            shortest[node] = lower.of_action(action)
    delta = np.divide(1.0, longest - shortest, out=np.zeros(actions), where=longest > shortest)
    # Columns: P_0 .. P_sink, then w_0 ..; the source is time 0.
    width = actions + 1 + actions
    entries: list[tuple[int, int, float]] = []
    limits: list[float] = []
    for node in (*range(actions), graph.sink):
        for earlier in graph.predecessors[node]:
            if earlier == graph.source:
                continue
            row = len(limits)
            entries += [(row, earlier, 1.0), (row, actions + 1 + earlier, 1.0)]
            entries.append((row, sink if node == graph.sink else node, -1.0))
            limits.append(-upper.communication_s if graph.crosses_ranks(earlier, node) else 0.0)
    for stage in range(schedule.stages):
        mine = [n for n, action in enumerate(graph.actions) if action.stage == stage and delta[n] > 0]
        entries += [(len(limits), actions + 1 + node, -delta[node]) for node in mine]
        limits.append(r_max * len(mine) - float(delta[mine] @ longest[mine]))

    rows, columns, values = zip(*entries, strict=True)
    matrix = coo_array((values, (rows, columns)), shape=(len(limits), width)).tocsr()
    table = matrix.toarray() if dense else matrix
    bounds: list[tuple[float, float | None]] = [(0.0, None)] * (actions + 1)
    bounds += zip(shortest.tolist(), longest.tolist(), strict=True)
    makespan = np.zeros(width)
    makespan[sink] = 1.0
    least = _optimum(makespan, table, limits, bounds)
    bounds[sink] = (0.0, least * (1.0 + MAKESPAN_SLACK))
    freezing = np.zeros(width)
    freezing[actions + 1 :] = -delta
    return least, _optimum(freezing, table, limits, bounds) + float(delta @ longest)


def _optimum(
    cost: NDArray[np.float64], table: object, limits: list[float], bounds: list[tuple[float, float | None]]
) -> float:
    options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    result = linprog(cost, A_ub=table, b_ub=limits, bounds=bounds, method="highs-ds", options=options)
    assert result.success, result.message
    return float(result.fun)
