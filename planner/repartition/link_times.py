"""Message times of candidates: between stages, and between pipelines that exchange gradients."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import numpy as np

from planner.profile import Link
from planner.repartition.problem import Candidates, Floats, Integers, RepartitionProblem
from planner.simulation.shard_parts import weight_bytes

_FIELDS = ("sender_s", "sender_s_per_byte", "bytes_per_s", "latency_s", "receiver_s", "receiver_s_per_byte")
"""Fields of a `Link`."""
SENDER, LINK, LATENCY, RECEIVER = range(4)
"""The parts of a message's time."""
NO_LINK = Link(latency_s=0.0, bytes_per_s=float("inf"))
"""Within a device."""


class LinkTimes:
    """Times on the links of one problem's devices."""

    def __init__(self, problem: RepartitionProblem) -> None:
        self._problem = problem

    @cached_property
    def _table(self) -> Floats:
        """float[6, P, P], by the fields of a link; 0 on the diagonal, with a bandwidth that no message notices."""
        ranks, links = self._problem.ranks, self._problem.profile.cluster.links
        return np.array(
            [
                [[getattr(links[a][b] or NO_LINK, name) for b in range(ranks)] for a in range(ranks)]
                for name in _FIELDS
            ]
        )

    def messages(self, candidates: Candidates) -> tuple[Floats, Floats]:
        """float[N, S, 4] of the messages to the next stage and to the previous one: sender, link, latency, receiver;
        0 within a rank."""
        problem = self._problem
        layers = problem.profile.model.layers
        places = candidates.distinct_orders[:, list(problem.stage_ranks)]
        before = candidates.cuts[:, 1:-1] - 1
        sizes = (
            np.array([layer.boundary_bytes for layer in layers], dtype=np.float64)[before],
            np.array([layer.boundary_grad_bytes for layer in layers], dtype=np.float64)[before],
        )
        there = np.zeros((len(candidates), problem.stages, 4))
        back = np.zeros((len(candidates), problem.stages, 4))
        if problem.stages > 1:
            there[:, :-1] = self._parts(places[:, :-1], places[:, 1:], sizes[0])
            back[:, 1:] = self._parts(places[:, 1:], places[:, :-1], sizes[1])
        return there, back

    def _parts(self, source: Integers, target: Integers, size: Floats) -> Floats:
        sender_s, sender_per_byte, bytes_per_s, latency_s, receiver_s, receiver_per_byte = self._table[
            :, source, target
        ]
        parts = np.empty((*size.shape, 4))
        parts[..., SENDER] = sender_s + size * sender_per_byte
        parts[..., LINK] = size / bytes_per_s
        parts[..., LATENCY] = latency_s
        parts[..., RECEIVER] = receiver_s + size * receiver_per_byte
        return parts

    def exchange_s(self, candidates: Candidates) -> Floats:
        """float[N, R]: the gradient exchange between pipelines, by rank of the schedule; as `exchanged_s`."""
        problem, plan = self._problem, self._problem.now
        pipelines = plan.pipeline_count
        if pipelines == 1:
            return np.zeros(candidates.orders.shape)
        layers, links = problem.profile.model.layers, problem.profile.cluster.links
        sent = [layer.exchanged_bytes for layer in layers]
        back = sent if plan.shards == 1 else [weight_bytes(problem.profile, layer) for layer in layers]
        sizes = [np.array([0, *accumulate(of)], dtype=np.float64) for of in (sent, back)]
        trained = np.array([0, *accumulate(layer.exchanged_bytes > 0 for layer in layers)], dtype=np.float64)
        cuts, others = candidates.cuts, pipelines - 1
        # Shared sums travel during the window.
        sent_copies = 0 if plan.shard == "gradients" else plan.windows
        seconds = np.zeros(candidates.orders.shape)
        siblings = [links[rank][rank + problem.ranks] for rank in range(problem.ranks)]
        fields = {
            name: np.array([getattr(link, name) for link in siblings])[candidates.orders] for name in _FIELDS
        }
        for stage, rank in enumerate(problem.stage_ranks):
            for copies, size in zip((sent_copies, 1), sizes, strict=True):
                if not copies:
                    continue
                part = copies * (size[cuts[:, stage + 1]] - size[cuts[:, stage]]) / pipelines
                count = copies * (trained[cuts[:, stage + 1]] - trained[cuts[:, stage]])
                seconds[:, rank] += (
                    others
                    * (
                        count * (fields["sender_s"] + fields["receiver_s"])[:, rank]
                        + part * (fields["sender_s_per_byte"] + fields["receiver_s_per_byte"])[:, rank]
                    )
                    + part / fields["bytes_per_s"][:, rank]
                )
                if stage == problem.stages_of_rank[rank][0]:
                    seconds[:, rank] += fields["latency_s"][:, rank]
        return seconds
