"""Step times of many candidates: a lower bound, which thousands can have, and the simulated time.

The simulated time is what `planner/simulation/predict.py` says of a plan without standbys, to rounding. The bound is
for any synchronous schedule: the busiest rank works without a pause between the first microbatch's way to it and the
last one's way back.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import numpy as np

from planner.ir import ActionKind
from planner.repartition.link_times import LINK, RECEIVER, SENDER, LinkTimes
from planner.repartition.problem import Candidates, Floats, Integers, Order, RepartitionProblem
from planner.shards import Piece, Shard
from planner.simulation.gradient_communication import fold_s, folding_s
from planner.simulation.many import Levels, ManyMessages, levels_of, neighbour_of, rank_ends_s
from planner.simulation.shard_parts import part_of


class Judge:
    """Times of candidates of one problem."""

    def __init__(self, problem: RepartitionProblem) -> None:
        self._problem = problem
        self._links = LinkTimes(problem)
        self.simulated = 0
        """Candidates simulated so far."""
        self.bounded = 0
        """Candidates bounded so far."""

    def step_s(self, candidates: Candidates) -> Floats:
        """float[N]: the simulated step of each, without standbys."""
        problem, levels = self._problem, self._levels
        self.simulated += len(candidates)
        slow = self._slow(candidates)
        stage_s = self._stage_s(candidates.cuts, slow)
        there, back = self._links.messages(candidates)
        parts = {ActionKind.FORWARD: there, ActionKind.BACKWARD: back, ActionKind.INPUT_GRAD: back}
        silent = np.zeros((4, len(candidates)))
        messages = [
            parts[kind][:, stage].T
            if kind in parts and 0 <= neighbour_of(kind, stage) < problem.stages
            else silent
            for kind, stage in levels.groups
        ]
        sender_s, link_s, latency_s, receiver_s = np.stack(messages, axis=1)
        ends_s = rank_ends_s(
            levels,
            self._seconds(candidates, slow, stage_s),
            ManyMessages(sender_s=sender_s, link_s=link_s, latency_s=latency_s, receiver_s=receiver_s),
        )
        return (ends_s.T + self._links.exchange_s(candidates)).max(axis=1) + self._outside_s(candidates, slow)

    def bound_s(self, candidates: Candidates) -> Floats:
        """float[N]: no step of a candidate is shorter than its bound."""
        problem = self._problem
        self.bounded += len(candidates)
        if problem.schedule.frozen_stages:
            return np.zeros(len(candidates))
        slow = self._slow(candidates)
        times = self._stage_s(candidates.cuts, slow)
        there, back = self._links.messages(candidates)
        head, tail = self._way_there_s(times, there), self._way_back_s(times, back)
        # A rank is held by the messages that it sends and receives.
        held = there[:, :, SENDER] + back[:, :, SENDER]
        held[:, 1:] += there[:, :-1, RECEIVER]
        held[:, :-1] += back[:, 1:, RECEIVER]
        without_weights = times["forward"] + times["input_grad"] + times["recompute"] + held
        without_weights *= problem.window.microbatches
        whole = without_weights + times["weight_grad_all"] + self._all_folds_s(candidates, slow)
        last_send = np.maximum(back[:, :, SENDER], there[:, :, SENDER])
        exchange_s = self._links.exchange_s(candidates)
        # A link carries one message at a time.
        carried = np.maximum(there[:, :, LINK], back[:, :, LINK]).max(axis=1)
        bounds = problem.window.microbatches * carried
        for rank in range(problem.ranks):
            own = list(problem.stages_of_rank[rank])
            begin = head[:, own].min(axis=1)
            # Split weight gradients may follow the last input gradient, whose message is on its way by then.
            answered = begin + (without_weights if problem.splits else whole)[:, own].sum(axis=1)
            np.maximum(bounds, answered + tail[:, own].min(axis=1), out=bounds)
            ended = begin + whole[:, own].sum(axis=1) - last_send[:, own].max(axis=1)
            np.maximum(bounds, ended + exchange_s[:, rank], out=bounds)
        return bounds + self._outside_s(candidates, slow)

    def _way_there_s(self, times: dict[str, Floats], there: Floats) -> Floats:
        """float[N, S]: until the first forward's input arrives; taking it in holds the rank already."""
        to_next = times["forward"][:, :-1] + there[:, :-1].sum(axis=2)
        way = np.zeros_like(there[:, :, 0])
        way[:, 1:] = np.cumsum(to_next, axis=1) - there[:, :-1, RECEIVER]
        return way

    def _way_back_s(self, times: dict[str, Floats], back: Floats) -> Floats:
        """float[N, S]: from when the last backward's message has left until the first stage has ended its own."""
        backward_s = times["input_grad"]
        if not self._problem.splits and self._problem.ratios is None:
            backward_s = backward_s + times["weight_grad"]
        on = back[:, 1:, LINK:].sum(axis=2) + backward_s[:, :-1]
        on[:, 1:] += back[:, 1:-1, SENDER]
        way = np.zeros_like(back[:, :, 0])
        way[:, 1:] = np.cumsum(on, axis=1)
        return way

    def busiest(self, cut: Integers, order: Order) -> Integers:
        """int[S]: the stages, those that take the most time of their ranks first."""
        candidates = Candidates.one_order(cut[None, :], order)
        times = self._stage_s(candidates.cuts, self._slow(candidates))
        busy_s = times["forward"] + times["input_grad"] + times["weight_grad"] + times["recompute"]
        busy_s += self._all_folds_s(candidates, self._slow(candidates)) / self._problem.window.microbatches
        return np.argsort(-busy_s[0], kind="stable")

    @cached_property
    def _levels(self) -> Levels:
        return levels_of(self._problem.window)

    def _slow(self, candidates: Candidates) -> Floats:
        """float[N, S], or float[1, S] if it is the same for all.

        All pipelines of a step end together, so the slowest sibling counts."""
        orders = candidates.orders
        if self._problem.slowdowns.constant:
            orders = candidates.distinct_orders
        slow = self._problem.slowdowns.of(candidates.cuts[: len(orders)], orders).max(axis=1)
        return slow[:, list(self._problem.stage_ranks)]

    @cached_property
    def _sums(self) -> dict[str, Floats]:
        """float[L + 1] per kind of time: seconds of the layers before each, on a device of slowdown 1."""
        layers, again = self._problem.profile.model.layers, frozenset(self._problem.now.recompute)
        count = self._problem.window.microbatches
        frozen = (
            self._unfrozen.sum(axis=0) if self._problem.ratios is not None else np.full(len(layers), count)
        )
        values = {
            "forward": [layer.forward_s for layer in layers],
            "input_grad": [layer.input_grad_s for layer in layers],
            "weight_grad": [layer.weight_grad_s for layer in layers],
            "weight_grad_all": [
                layer.weight_grad_s * left for layer, left in zip(layers, frozen, strict=True)
            ],
            "recompute": [layer.forward_s if number in again else 0.0 for number, layer in enumerate(layers)],
        }
        return {name: np.array([0.0, *accumulate(of)]) for name, of in values.items()}

    @cached_property
    def _kept_sums(self) -> Floats:
        """float[L + 1]: as `_sums`, what the forward passes of stages after the first take beside that."""
        return np.array([0.0, *accumulate(layer.kept_s for layer in self._problem.profile.model.layers)])

    @cached_property
    def _update_sums(self) -> list[Floats]:
        """float[L + 1] per shard of a layer: seconds of its update in the layers before each, on a device of slowdown
        1."""
        layers, of = self._problem.profile.model.layers, self._problem.now.shards
        return [
            np.array(
                [
                    0.0,
                    *accumulate(
                        part_of(layer, Piece(index, Shard(number, of))) * layer.update_s
                        for index, layer in enumerate(layers)
                    ),
                ]
            )
            for number in range(of)
        ]

    @cached_property
    def _unfrozen(self) -> Floats:
        """float[M, L]: the share of each weight gradient's time that is left."""
        ratios = self._problem.ratios
        assert ratios is not None
        return np.tile(1.0 - np.array(ratios).T, (self._problem.now.windows, 1))

    def _stage_s(self, cuts: Integers, slow: Floats) -> dict[str, Floats]:
        """float[N, S] per kind of time."""
        times = {name: (sums[cuts[:, 1:]] - sums[cuts[:, :-1]]) * slow for name, sums in self._sums.items()}
        times["forward"][:, 1:] += (self._kept_sums[cuts[:, 2:]] - self._kept_sums[cuts[:, 1:-1]]) * slow[
            :, 1:
        ]
        return times

    def _seconds(self, candidates: Candidates, slow: Floats, times: dict[str, Floats]) -> Floats:
        """float[G, N] by group of actions; float[A, N] by action if weight gradients are frozen."""
        cuts = candidates.cuts
        of_kind = {
            ActionKind.FORWARD: times["forward"],
            ActionKind.INPUT_GRAD: times["input_grad"],
            ActionKind.WEIGHT_GRAD: times["weight_grad"],
            ActionKind.BACKWARD: times["input_grad"] + times["weight_grad"],
            ActionKind.RECOMPUTE: times["recompute"],
        }
        folds = self._folds_s(candidates, slow) if self._folding else {}
        if self._problem.ratios is None:
            of_kind |= {kind: of_kind[kind] + longer_s[0] for kind, longer_s in folds.items()}
        by_group = np.stack([of_kind[kind][:, stage] for kind, stage in self._levels.groups])
        if self._problem.ratios is None:
            return by_group
        levels = self._levels
        by_action = by_group[levels.group_of]
        weights = np.array([layer.weight_grad_s for layer in self._problem.profile.model.layers])
        zero = np.zeros((len(self._unfrozen), 1))
        frozen = np.concatenate([zero, np.cumsum((1.0 - self._unfrozen) * weights, axis=1)], axis=1)
        saved = (frozen[:, cuts[:, 1:]] - frozen[:, cuts[:, :-1]]) * slow
        kinds = [kind for kind, _ in levels.groups]
        stages = np.array([stage for _, stage in levels.groups])[levels.group_of]
        forms = np.array([kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD) for kind in kinds])[
            levels.group_of
        ]
        rows = np.flatnonzero(forms)
        by_action[rows] -= saved[levels.index_of[rows], :, stages[rows]]
        for kind, longer_s in folds.items():
            rows = np.flatnonzero(np.array([each is kind for each in kinds])[levels.group_of])
            by_action[rows] += longer_s[levels.index_of[rows], :, stages[rows]]
        return by_action

    @property
    def _folding(self) -> bool:
        """Whether siblings share out the sums of gradients, so that these travel during the window."""
        return self._problem.now.shard == "gradients" and self._problem.now.pipeline_count > 1

    def _all_folds_s(self, candidates: Candidates, slow: Floats) -> Floats:
        """float[N, S]: how much longer the actions of a step take that form gradients, because these travel."""
        if not self._folding:
            return np.zeros((1, 1))
        problem = self._problem
        folds = self._folds_s(candidates, slow)[
            ActionKind.WEIGHT_GRAD if problem.splits else ActionKind.BACKWARD
        ]
        return folds.sum(axis=0) * (problem.window.microbatches / len(folds))

    def _folds_s(self, candidates: Candidates, slow: Floats) -> dict[ActionKind, Floats]:
        """By kind of action, float[M, N, S]: how much longer it takes because its gradients travel; as `folded_s`. M is
        1 where nothing is frozen: all microbatches take as long."""
        layers = self._problem.profile.model.layers
        left = np.ones((1, len(layers))) if self._problem.ratios is None else self._unfrozen
        weight_s = left * np.array([layer.weight_grad_s for layer in layers])
        whole_s = weight_s + np.array([layer.input_grad_s for layer in layers])
        formed = {ActionKind.BACKWARD: whole_s, ActionKind.WEIGHT_GRAD: weight_s}
        numbers, held_s, travel_s = self._fold_table
        count = np.arange(len(numbers))
        first = np.searchsorted(numbers, candidates.cuts[:, :-1])[..., None]
        stop = np.searchsorted(numbers, candidates.cuts[:, 1:])[..., None]
        inside = (count >= first) & (count < stop)
        meanwhile = np.where(count == first, stop, count) - 1
        places = candidates.orders[:, list(self._problem.stage_ranks)]
        held_s, travel_s = held_s[places], travel_s[places]

        def longer_s(times_s: Floats) -> Floats:
            meanwhile_s = times_s[numbers][meanwhile] * slow[..., None]
            return np.where(inside, folding_s(held_s, travel_s, meanwhile_s), 0.0).sum(axis=2)

        return {
            kind: np.stack([longer_s(of_microbatch) for of_microbatch in times_s])
            for kind, times_s in formed.items()
        }

    @cached_property
    def _fold_table(self) -> tuple[Integers, Floats, Floats]:
        """The numbers of the layers that have gradients, K of them; and by place of a pipeline and such a layer,
        float[R, K], what `fold_s` says."""
        problem, layers = self._problem, self._problem.profile.model.layers
        pipelines, cluster = problem.now.pipeline_count, problem.profile.cluster
        links, devices = cluster.links, cluster.devices
        trained = [number for number, layer in enumerate(layers) if layer.exchanged_bytes]
        sizes = np.array([layers[number].exchanged_bytes / pipelines for number in trained])
        of_places = [
            fold_s(link, devices[place], sizes, pipelines - 1)
            for place in range(problem.ranks)
            if (link := links[place][place + problem.ranks]) is not None
        ]
        held_s, travel_s = (np.stack(of_one) for of_one in zip(*of_places, strict=True))
        return np.array(trained, dtype=np.int64), held_s, travel_s

    def _outside_s(self, candidates: Candidates, slow: Floats) -> Floats:
        """float[N]: the longest update, and the commit; as `outside_s`."""
        problem, cuts = self._problem, candidates.cuts
        longest_s = np.zeros(len(cuts))
        for sums in self._update_sums:
            stage_s = (sums[cuts[:, 1:]] - sums[cuts[:, :-1]]) * slow
            of_rank = np.zeros((len(cuts), problem.ranks))
            for stage, rank in enumerate(problem.stage_ranks):
                of_rank[:, rank] += stage_s[:, stage]
            np.maximum(longest_s, of_rank.max(axis=1), out=longest_s)
        return longest_s + problem.profile.cluster.commit_s
