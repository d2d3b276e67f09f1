"""The freeze program as a sparse linear program. HiGHS solves it from a constructed or remembered basis.

Columns: the start of every node of the network (the sink's is the makespan), then the freeze ratio of every action
that computes a weight gradient. Rows: constraint [1] per edge, then constraint [4] per stage. Knows no schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from planner.simulation.longest_path import Floats, Integers, Network

TIE_BREAK = 1e-3
"""Lambda of eq. 6 in the first of three solves, in `Instance.unit_s`."""
MAKESPAN_SLACK = 1e-8
"""Share of the makespan that is traded for less freezing: without it, tiny gains can cost any amount of freezing."""
TOLERANCE = 1e-9
"""On rows, bounds and reduced costs; times in `Instance.unit_s`."""


@dataclass(frozen=True)
class Instance:
    """The numbers of one program; times in seconds. At least one action saves time."""

    network: Network
    longest: Floats
    """float[A], duration of every action with nothing frozen."""
    savings: Floats
    """float[A], seconds that freezing all of an action saves; 0 where there is nothing to freeze."""
    freezable: Integers
    """int[K], the actions that compute weight gradients."""
    stage_of: Integers
    """int[K], their stages."""
    budgets: Floats
    """float[S], the largest sum of the ratios of a stage's actions."""

    @property
    def unit_s(self) -> float:
        """The solver's unit of time, to which its absolute tolerances fit: the mean saving of an action."""
        return float(self.savings[self.savings > 0].mean())


@dataclass(frozen=True)
class Optimum:
    """The solver's result."""

    ratios: Floats
    """float[K]: of all ratios that reach the least makespan, those with the least sum."""
    budget_values: Floats
    """float[S]: seconds by which the next unit of a budget shortens the makespan."""


class FreezeModel:
    """Solves instances in turn; an instance of the same shape as the previous one starts from its basis."""

    def __init__(self) -> None:
        self._shape: tuple[bytes, ...] | None = None
        self._basis: highspy.HighsBasis | None = None

    def solve(self, instance: Instance) -> Optimum:
        """The least makespan and, within `MAKESPAN_SLACK` of it, the least freezing.

        There are three solves, each from the previous basis. Eq. 6 with a coarse tie-break does nearly all the work and
        ends near both optima. The second minimizes the makespan alone; the third fixes it and minimizes freezing.
        """
        network, ratios = instance.network, len(instance.freezable)
        makespan_cost = np.zeros(network.nodes + ratios)
        makespan_cost[network.sink] = 1.0
        freezing_cost = np.zeros(network.nodes + ratios)
        freezing_cost[network.nodes :] = 1.0
        highs = _solver(_linear_program(instance))
        shape = _shape(instance)

        known = self._basis if shape == self._shape else None
        highs.setBasis(known if known is not None else _starting_basis(instance))
        _minimise(highs, makespan_cost + TIE_BREAK * freezing_cost, _DUAL)
        self._basis, self._shape = highs.getBasis(), shape
        _minimise(highs, makespan_cost, _PRIMAL)
        least_makespan = highs.getInfo().objective_function_value
        budget_duals = np.array(highs.getSolution().row_dual)[-len(instance.budgets) :]
        highs.changeColBounds(network.sink, 0.0, least_makespan * (1.0 + MAKESPAN_SLACK))
        _minimise(highs, freezing_cost, _PRIMAL)

        found = np.clip(np.array(highs.getSolution().col_value)[network.nodes :], 0.0, 1.0)
        found[found < 10 * TOLERANCE] = 0.0
        return Optimum(found, np.maximum(0.0, -budget_duals) * instance.unit_s)


_DUAL, _PRIMAL, _DEVEX = 1, 4, 1
"""HiGHS's numbers for its simplex methods and for a pricing rule."""


def _solver(program: highspy.HighsLp) -> highspy.Highs:
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("solver", "simplex")
    # Presolve would discard the basis, and removes hardly anything.
    highs.setOptionValue("presolve", "off")
    # For a basis that is not all slack, exact steepest-edge weights cost more than the iterations that they save.
    highs.setOptionValue("simplex_dual_edge_weight_strategy", _DEVEX)
    highs.setOptionValue("dual_simplex_cost_perturbation_multiplier", 0.1)
    highs.setOptionValue("primal_feasibility_tolerance", TOLERANCE)
    highs.setOptionValue("dual_feasibility_tolerance", TOLERANCE)
    highs.passModel(program)
    return highs


def _minimise(highs: highspy.Highs, cost: Floats, method: int) -> None:
    highs.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)
    highs.setOptionValue("simplex_strategy", method)
    highs.run()
    status = highs.getModelStatus()
    # Freezing nothing is feasible and no makespan is negative, so an optimum exists.
    assert status == highspy.HighsModelStatus.kOptimal, highs.modelStatusToString(status)


def _shape(instance: Instance) -> tuple[bytes, ...]:
    """Equal for two instances if they have the same rows and columns."""
    tails, heads, _ = instance.network.edges
    return tails.tobytes(), heads.tobytes(), instance.freezable.tobytes(), instance.stage_of.tobytes()


def _linear_program(instance: Instance) -> highspy.HighsLp:
    network, ratios, stages = instance.network, len(instance.freezable), len(instance.budgets)
    tails, heads, delays = network.edges
    durations = np.zeros(network.nodes)
    durations[: network.actions] = instance.longest
    column_of = np.full(network.nodes, -1)
    column_of[instance.freezable] = network.nodes + np.arange(ratios)
    savings = np.zeros(network.nodes)
    savings[: network.actions] = instance.savings / instance.unit_s

    # [1]: begin[head] - begin[tail] + savings[tail] * ratio[tail] >= duration[tail] + delay.
    edges = np.arange(len(tails))
    freezes = column_of[tails] >= 0
    by_stage = np.argsort(instance.stage_of, kind="stable")
    rows = np.concatenate([edges, edges, edges[freezes], len(edges) + instance.stage_of[by_stage]])
    columns = np.concatenate([heads, tails, column_of[tails[freezes]], network.nodes + by_stage])
    values = np.concatenate(
        [np.ones(len(edges)), -np.ones(len(edges)), savings[tails[freezes]], np.ones(ratios)]
    )
    order = np.argsort(rows, kind="stable")

    program = highspy.HighsLp()
    program.num_col_ = network.nodes + ratios
    program.num_row_ = len(edges) + stages
    program.col_cost_ = np.zeros(network.nodes + ratios)
    program.col_lower_ = np.zeros(network.nodes + ratios)
    program.col_upper_ = np.concatenate([np.full(network.nodes, highspy.kHighsInf), np.ones(ratios)])
    program.row_lower_ = np.concatenate(
        [(durations[tails] + delays) / instance.unit_s, np.full(stages, -highspy.kHighsInf)]
    )
    program.row_upper_ = np.concatenate([np.full(len(edges), highspy.kHighsInf), instance.budgets])
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    counts = np.bincount(rows, minlength=len(edges) + stages)
    program.a_matrix_.start_ = np.concatenate([[0], np.cumsum(counts)])
    program.a_matrix_.index_ = columns[order]
    program.a_matrix_.value_ = values[order]
    return program


def _starting_basis(instance: Instance) -> highspy.HighsBasis:
    """The tree of longest paths with everything frozen: the critical edge of each node determines its start.

    It is dual feasible: one unit flows along the critical path, and a ratio on that path is at 1, where its reduced
    cost has the right sign. On 32 stages it saves a quarter to two thirds of the iterations.
    """
    network = instance.network
    shortest = (instance.longest - instance.savings).tolist()
    waits_for = network.critical_edges(shortest)
    critical: set[int] = set()
    node, edge = network.sink, waits_for[network.sink]
    while edge is not None:
        node = network.incoming[node][edge][0]
        critical.add(node)
        edge = waits_for[node]

    status = highspy.HighsBasisStatus
    basis = highspy.HighsBasis()
    basis.col_status = [status.kLower if edge is None else status.kBasic for edge in waits_for] + [
        status.kUpper if node in critical else status.kLower for node in instance.freezable.tolist()
    ]
    basis.row_status = [
        status.kLower if edge == waits_for[head] else status.kBasic
        for head, before in enumerate(network.incoming)
        for edge in range(len(before))
    ] + [status.kBasic] * len(instance.budgets)
    basis.valid = True
    return basis
