"""The freeze program as a sparse linear program. HiGHS solves it from a constructed or remembered basis.

Columns: the start of every node of the network (the sink's is the makespan), then freeze ratios, one or more of every
action that computes a weight gradient. Rows: constraint [1] per edge, then the limits of weighted sums of ratios, such
as constraint [4] per stage. Knows no schedule.
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
MOST_ROUNDS = 30
"""Solves of a quotient; it takes some five, as each at least halves what is left."""
PRICE_OF_NOTHING = 1e-7
"""Price, in `Instance.unit_s`, of a ratio that takes nothing of a denominator: it freezes only if it gains."""


@dataclass(frozen=True)
class Instance:
    """The numbers of one program; times in seconds. At least one action saves time."""

    network: Network
    longest: Floats
    """float[A], duration of every action with nothing frozen."""
    freezable: Integers
    """int[K], per ratio the action that it shortens; several may shorten one."""
    savings: Floats
    """float[K], seconds by which its ratio of 1 shortens it."""
    limit_of: Integers
    """int[K], per ratio the limit under which it falls."""
    weights: Floats
    """float[K], its weight there."""
    limits: Floats
    """float[S], the largest weighted sums of ratios."""

    @property
    def unit_s(self) -> float:
        """The solver's unit of time, to which its absolute tolerances fit: the mean saving of a ratio."""
        return float(self.savings[self.savings > 0].mean())

    @property
    def shortest(self) -> Floats:
        """float[A], duration of every action with everything frozen."""
        return self.longest - np.bincount(self.freezable, weights=self.savings, minlength=len(self.longest))


@dataclass(frozen=True)
class Optimum:
    """The solver's result."""

    ratios: Floats
    """float[K]: of all ratios that reach the least makespan, those with the least sum."""
    limit_values: Floats
    """float[S]: seconds by which the next unit of a limit shortens the makespan."""


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
        duals = _limit_duals(highs, instance)
        highs.changeColBounds(network.sink, 0.0, least_makespan * (1.0 + MAKESPAN_SLACK))
        _minimise(highs, freezing_cost, _PRIMAL)

        return Optimum(_ratios(highs, instance), duals)

    def solve_quotient(self, instance: Instance, shares: Floats, rest_s: float) -> Floats:
        """The ratios with the least (makespan + `rest_s`) / (1 - shares . ratios), float[K], by Dinkelbach's iteration:
        each solve puts the quotient of the one before it as a price on what its ratios take of the denominator, and
        starts from its basis.

        Args:
            shares: float[K], not negative; the instance's limits keep the denominator above 0.
        """
        network, unit_s = instance.network, instance.unit_s
        highs = _solver(_linear_program(instance))
        shape = _shape(instance)
        known = self._basis if shape == self._shape else None
        highs.setBasis(known if known is not None else _starting_basis(instance))
        cost = np.zeros(network.nodes + len(shares))
        cost[network.sink] = 1.0
        best, quotient = np.zeros(len(shares)), np.inf
        price = (network.starts(instance.longest.tolist())[network.sink] + rest_s) / unit_s
        for number in range(MOST_ROUNDS):
            cost[network.nodes :] = price * shares + PRICE_OF_NOTHING
            _minimise(highs, cost, _PRIMAL if number else _DUAL)
            found = _ratios(highs, instance)
            makespan = np.array(highs.getSolution().col_value)[network.sink]
            then = (makespan + rest_s / unit_s) / (1.0 - float(shares @ found))
            if then >= quotient * (1.0 - TOLERANCE):
                break
            best, quotient, price = found, then, then
        self._basis, self._shape = highs.getBasis(), shape
        return best


def _ratios(highs: highspy.Highs, instance: Instance) -> Floats:
    found = np.clip(np.array(highs.getSolution().col_value)[instance.network.nodes :], 0.0, 1.0)
    found[found < 10 * TOLERANCE] = 0.0
    return found


def _limit_duals(highs: highspy.Highs, instance: Instance) -> Floats:
    duals = np.array(highs.getSolution().row_dual)[-len(instance.limits) :]
    return np.maximum(0.0, -duals) * instance.unit_s


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
    return tails.tobytes(), heads.tobytes(), instance.freezable.tobytes(), instance.limit_of.tobytes()


def _linear_program(instance: Instance) -> highspy.HighsLp:
    network, ratios, limits = instance.network, len(instance.freezable), len(instance.limits)
    tails, heads, delays = network.edges
    durations = np.zeros(network.nodes)
    durations[: network.actions] = instance.longest

    # [1]: begin[head] - begin[tail] + sum of savings * ratio of tail >= duration[tail] + delay.
    edges = np.arange(len(tails))
    by_action = np.argsort(instance.freezable, kind="stable")
    shortened = instance.freezable[by_action]
    first = np.searchsorted(shortened, tails, side="left")
    count = np.searchsorted(shortened, tails, side="right") - first
    freezing = np.repeat(edges, count)
    own = by_action[np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())]
    by_limit = np.argsort(instance.limit_of, kind="stable")
    rows = np.concatenate([edges, edges, freezing, len(edges) + instance.limit_of[by_limit]])
    columns = np.concatenate([heads, tails, network.nodes + own, network.nodes + by_limit])
    values = np.concatenate(
        [
            np.ones(len(edges)),
            -np.ones(len(edges)),
            instance.savings[own] / instance.unit_s,
            instance.weights[by_limit],
        ]
    )
    order = np.argsort(rows, kind="stable")

    program = highspy.HighsLp()
    program.num_col_ = network.nodes + ratios
    program.num_row_ = len(edges) + limits
    program.col_cost_ = np.zeros(network.nodes + ratios)
    program.col_lower_ = np.zeros(network.nodes + ratios)
    program.col_upper_ = np.concatenate([np.full(network.nodes, highspy.kHighsInf), np.ones(ratios)])
    program.row_lower_ = np.concatenate(
        [(durations[tails] + delays) / instance.unit_s, np.full(limits, -highspy.kHighsInf)]
    )
    program.row_upper_ = np.concatenate([np.full(len(edges), highspy.kHighsInf), instance.limits])
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    counts = np.bincount(rows, minlength=len(edges) + limits)
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
    shortest = instance.shortest.tolist()
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
    ] + [status.kBasic] * len(instance.limits)
    basis.valid = True
    return basis
