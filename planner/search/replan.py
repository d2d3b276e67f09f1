"""Plan and schedule of a job after a rank failed or joined, computed while ranks wait.

A job builds its `Replanner` at startup; it holds everything that replanning needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated

from planner.codec import NOT_WRITTEN
from planner.ir import Schedule
from planner.plan import Plan, PlanError
from planner.profile import ModelProfile, Profile
from planner.schedule.expand import schedule_after, without_recompute
from planner.schedule.validate import validate
from planner.search.balanced_shares import balanced_shares
from planner.search.evaluate import PROGRAMS, Evaluator
from planner.search.fallback_shapes import Option, ShapeOptions, options
from planner.search.gain import ComparedPlans
from planner.search.packing import packed
from planner.search.recomputing import every_recompute, least_recompute
from planner.search.search import END_TO_END, QUICK, ChosenPlan, choose_among
from planner.search.standbys import protected
from planner.search.unmeasured import unmeasured_plan
from planner.shards import Piece
from planner.shares import check_shares, for_replicas
from planner.simulation.costs import memory_limits
from planner.simulation.predict import Prediction, predict
from planner.simulation.resized_cluster import Sites, limited, links_are_uniform, resized, with_links_of
from planner.simulation.shard_parts import built_ahead_bytes, built_bytes
from planner.simulation.slow_links import SlowLink, with_slow_links
from planner.wording import counted, named, seconds

_ANSWERS = 512
"""Answers that are remembered."""


@dataclass(frozen=True)
class _Answer:
    """A plan and its schedule, before it gets its epoch, version and reason."""

    plan: Plan
    schedule: Schedule
    why: str


@dataclass(frozen=True, kw_only=True)
class Replanner:
    """Plans for any number of ranks of one job."""

    first: Plan
    """The first plan of the job. With the same number of ranks it applies again."""
    schedule: Schedule
    """The schedule of `first`, with its recomputes."""
    parameters: tuple[int, ...]
    """Per layer."""
    copies: int
    """Copies that each layer has beside itself, if there are domains enough."""
    copy_every: int = 1
    """1: copies are standbys; more: snapshots, one every so many steps."""
    profile: Profile | None = None
    """With at least one rank's device and the job's memory limits; without a profile the cut is by parameters."""
    limits: tuple[int | None, ...] = ()
    """By place, the most memory that a plan may take there, as the profile counts it; None, or no entry: all that the
    device has."""
    links: tuple[SlowLink, ...] = ()
    """By place, the links that are slower than those of the profile."""
    linked: tuple[int | None, ...] = ()
    """By place, the device of the profile whose measured links it has; None, or no entry: it has typical links."""
    divisible: bool = True
    """Whether pipelines may have uneven shares: no layer has buffers that training changes, and the batch stays."""
    frozen: int = 0
    """Layers, from the input up, that are frozen as a whole now: plans count on no backward pass of theirs."""
    first_frozen: int = 0
    """Frozen layers for which `first` was cut: while it is as many, `first` applies again."""
    released: int = 0
    """Frozen layers that are trained in no step that a plan is for: they need no memory for it, and stages of these
    alone no backward pass (`Plan.frozen`)."""
    kept: int = 0
    """Frozen layers whose outputs the first stage keeps, as far as it has them: from the next epoch on it computes none
    of these."""
    pipelines: int | None = None
    """Pipelines that plans have, as far as there are ranks for them; None: as many as make the shortest step."""
    frozen_cost: float | None = None
    """Size of a frozen layer over that of a trained one, where PipeTransformer's Algorithm 1 lays pipelines out once
    more layers are frozen; None: the search does."""

    _known: Annotated[dict[Sites, _Answer], NOT_WRITTEN] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The newest answers."""
    _cut: Annotated[dict[Option, tuple[Plan, Schedule]], NOT_WRITTEN] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Without a profile: the plan of each shape, without standbys. Domains change only those."""

    def plan_for(
        self,
        ranks: int,
        *,
        epoch: int,
        version: int,
        reason: str,
        domains: Sequence[str],
        slowdowns: Sequence[float | None] | None = None,
    ) -> tuple[Plan, Schedule]:
        """The plan for `ranks` ranks, which may be more than `first` has, and its schedule. The first `plan.world_size`
        ranks are its places; the others are spare.

        Args:
            reason: why the job needs another plan; a description of the plan follows it.
            domains: per rank, in the order of places, its failure domain, see `failure_domains.py`.
            slowdowns: per rank, as measured since the profile; None: as the median of the profile's devices.

        Raises:
            PlanError: no plan fits; says by how much, and what would help.
        """
        if ranks < 1:
            raise PlanError(f"no plan for {ranks} ranks: a pipeline has at least 1")
        if len(domains) != ranks:
            raise ValueError(f"{ranks} ranks, and {len(domains)} domains are given")
        answer = self._answer(Sites.of(domains, slowdowns))
        summary, step_s = answer.why, answer.plan.predicted_step_s
        if step_s is not None:
            summary += f"; a step is predicted to take {seconds(step_s)}"
        said = f"{reason}: {summary}" if reason else summary
        return replace(answer.plan, epoch=epoch, version=version, reason=said), answer.schedule

    def with_replicas(self, replicas: int) -> Replanner:
        """Plans for steps of so many replicas, as the course of the job's batch may have them."""
        if replicas == self.first.replicas:
            return self
        return replace(self, first=for_replicas(self.first, replicas))

    def with_standbys(self, plan: Plan, domains: Sequence[str]) -> Plan:
        """`plan` with the standbys, or the snapshots, for its places in `domains`, which may have more places."""
        sizes = self.parameters
        if self.profile is not None:
            sizes = tuple(layer.parameter_bytes for layer in self.profile.model.layers)
        return protected(plan, domains, sizes, self.copies, self.copy_every)

    def with_shares(
        self, plan: Plan, domains: Sequence[str], slowdowns: Sequence[float | None] | None = None
    ) -> Plan:
        """`plan` with the shares of its pipelines that make the shortest step, the same bits as ever; without shares if
        even ones are as good, if the job has no profile, or if its replicas cannot be divided.

        Args:
            slowdowns: as for `plan_for`.
        """
        if self.profile is None or not self.divisible or plan.pipeline_count == 1:
            return replace(plan, shares=())
        profile = self._profile_on(self.profile, Sites.of(domains, slowdowns).first(plan.world_size))
        return balanced_shares(profile, plan, self._schedule_of(plan)).plan

    def checked(
        self, plan: Plan, domains: Sequence[str], slowdowns: Sequence[float | None] | None = None
    ) -> tuple[Plan, Schedule]:
        """`plan` with its standbys for `domains` and its prediction; and its validated schedule.

        Raises:
            PlanError: `plan` does not fit the memory; says by how much. Or it has shares that it cannot have.
        """
        schedule = self._schedule_of(plan)
        validate(schedule)
        check_shares(plan)
        if plan.shares and not self.divisible:
            raise PlanError(
                f"shares {list(plan.shares)} would divide replicas among pipelines, but the model has buffers that"
                " training changes from microbatch to microbatch, or its batch grows (freeze.batch): its replicas stay"
                " whole"
            )
        plan = self.with_standbys(plan, domains)
        prediction = self.check_memory(plan, domains, slowdowns=slowdowns)
        return _with_prediction(plan, prediction), schedule

    def check_memory(
        self,
        plan: Plan,
        domains: Sequence[str],
        now: Plan | None = None,
        then: Plan | None = None,
        ahead: Sequence[Collection[Piece]] = (),
        slowdowns: Sequence[float | None] | None = None,
    ) -> Prediction | None:
        """Check that `plan` fits the memory with its standbys. Return its prediction; None: the job has no profile.

        Args:
            now: the plan in force, if `plan` comes on the way from it: a place may take as much as it takes now.
            then: the plan that comes next, if places build what they lack of it beside training.
            ahead: per place, what it builds beside training for another generation.
            slowdowns: as for `plan_for`.

        Raises:
            PlanError: it does not; says by how much.
        """
        if self.profile is None:
            return None
        on = self._profile_on(self.profile, Sites.of(domains, slowdowns).first(plan.world_size))
        prediction = predict(on, plan, self._schedule_of(plan))
        building = [*built_ahead_bytes(on, plan, then or plan)]
        for number, pieces in enumerate(ahead):
            rank = plan.place(number).rank
            building[rank] = max(building[rank], built_bytes(on, pieces))
        peaks = [peak + more for peak, more in zip(prediction.memory.peak_bytes, building, strict=True)]
        limits = memory_limits(on.cluster, plan.pipeline_ranks, plan.pipeline_count)
        over = [max(0, peak - limit) for peak, limit in zip(peaks, limits, strict=True)]
        if any(over) and now is not None:
            taken = predict(on, now, self._schedule_of(now)).memory.peak_bytes
            compared = zip(over, peaks, taken, strict=True)
            over = [0 if peak <= before else excess for excess, peak, before in compared]
        excess = max(over)
        if excess:
            place = over.index(excess)
            needed = peaks[place]
            raise PlanError(
                f"place {place} would need {needed:,} bytes, which is {counted(excess, 'byte')} more"
                " than its device has: move fewer layers, or others away from it first"
            )
        return prediction

    def compared(
        self,
        now: Plan,
        ranks: int,
        *,
        domains: Sequence[str] | None = None,
        slowdowns: Sequence[float | None] | None = None,
    ) -> ComparedPlans:
        """`now` beside the plan for `ranks` ranks.

        Args:
            domains: per rank, those of `now` first; None: all ranks are in one domain.
            slowdowns: likewise, as `plan_for` has them.

        Raises:
            PlanError: no plan fits `ranks` ranks.
        """
        sites = Sites.of(domains or ("",) * ranks, slowdowns)
        now = for_replicas(now, self.first.replicas)
        answer, running = self._answer(sites), self._schedule_of(now)
        same_program = answer.schedule.frozen_stages <= running.frozen_stages
        return ComparedPlans(
            now=now,
            then=answer.plan,
            ranks=ranks,
            now_s=self._step_s(now, running, sites),
            then_s=self._step_s(answer.plan, answer.schedule, sites),
            predicted=self.profile is not None,
            same=ranks == now.world_size and same_program and answer.plan.same_work_as(now),
        )

    def _answer(self, sites: Sites) -> _Answer:
        answer = self._known.get(sites)
        if answer is None:
            answer = self._known[sites] = self._new_answer(sites)
            # Several threads may be here at once.
            for oldest in list(self._known)[:-_ANSWERS]:
                self._known.pop(oldest, None)
        return answer

    def _new_answer(self, sites: Sites) -> _Answer:
        if self.pipelines is None:
            return self._made(sites)
        try:
            return self._made(sites)
        except PlanError as error:
            # As many as are asked for have no plan on these ranks.
            answer = replace(self, pipelines=None)._made(sites)
            why = f"{answer.why}, as {counted(self.pipelines, 'pipeline')} cannot be: {error}"
            return replace(answer, why=why)

    def _made(self, sites: Sites) -> _Answer:
        ranks, first = len(sites.domains), self.first
        as_measured = not self.linked or self.linked == tuple(range(ranks))
        alike = sites.alike and not self.links and as_measured
        as_asked = self.pipelines in (None, first.pipeline_count)
        if as_asked and ranks == first.world_size and (self.profile is None or (alike and self._as_cut)):
            plan = replace(self.with_standbys(first, sites.names), frozen=self.released)
            schedule = self._schedule_of(plan)
            prediction = self._prediction(plan, schedule, sites)
            if prediction is None or prediction.fits:
                if prediction is not None and sites.slowdowns is not None:
                    plan = _with_prediction(plan, prediction)
                return _Answer(plan, schedule, f"as it began, on {counted(ranks, 'rank')}")
        found = options(first, without_recompute(self.schedule), ranks, self.pipelines)
        if not (found.own or found.others):
            raise PlanError(f"no plan for {counted(ranks, 'rank')}: {found.why_not}")
        if self.profile is None:
            return self._by_parameters(found, sites)
        if self.frozen_cost is not None and not self._as_cut and self.pipelines is None:
            answer = self._packed(self.profile, sites, self.frozen_cost)
            if answer is not None:
                return answer
        return self._as_before(self.profile, sites) or self._by_profile(self.profile, found, sites)

    def _as_before(self, profile: Profile, sites: Sites) -> _Answer | None:
        """The known plan for as many ranks in other domains, if domains change only standbys; None if there is none, or
        if it does not fit the memory with the new standbys."""
        if self.links or self.linked or not links_are_uniform(profile.cluster):
            return None
        for known, answer in list(self._known.items()):
            if len(known.domains) == len(sites.domains) and known.slowdowns == sites.slowdowns:
                plan = self.with_standbys(answer.plan, sites.names)
                prediction = predict(self._profile_on(profile, sites), plan, answer.schedule)
                if prediction.fits:
                    return replace(answer, plan=_with_prediction(plan, prediction))
        return None

    def _by_profile(self, profile: Profile, found: ShapeOptions, sites: Sites) -> _Answer:
        if not self.limits:
            return self._searched(profile, found, sites, self.first.recompute)
        answers: list[_Answer] = []
        refusals: list[PlanError] = []
        for recompute in dict.fromkeys((self.first.recompute, every_recompute(self.first))):
            try:
                answers.append(self._searched(profile, found, sites, recompute))
            except PlanError as error:
                refusals.append(error.with_traceback(None))
        if not answers:
            raise refusals[-1]
        on = self._profile_on(profile, sites)
        leaner = [self._recomputing_less(on, answer) for answer in answers]
        return min(leaner, key=lambda answer: answer.plan.predicted_step_s or 0.0)

    def _recomputing_less(self, on: Profile, answer: _Answer) -> _Answer:
        """`answer` without the recomputations that it does not need to fit the memory of `on`."""
        prediction = least_recompute(
            predict(on, answer.plan, answer.schedule), self.first.recompute, self._schedule_of
        )
        plan = _with_prediction(prediction.plan, prediction)
        again = [layer for layer in plan.recompute if layer not in self.first.recompute]
        why = f"{answer.why}; {named('layer', again)} recompute" if again else answer.why
        return _Answer(plan, self._schedule_of(plan), why)

    def _searched(
        self, profile: Profile, found: ShapeOptions, sites: Sites, recompute: tuple[int, ...]
    ) -> _Answer:
        resized_profile, pattern = self._profile_on(profile, sites), sites.domains
        # The other programs were chosen for devices, links and layers that are alike, and some know no memory.
        alike = sites.alike and not self.limits and not self.links and not self.linked
        as_first = alike and self._as_cut and self.first.partition in PROGRAMS
        program = self.first.partition if as_first else END_TO_END

        def chosen(pool: Sequence[Option]) -> ChosenPlan:
            evaluators = [
                Evaluator(
                    resized_profile,
                    option.shape,
                    replicas=self.first.replicas,
                    recompute=recompute,
                    frozen=self.released,
                    pipelines=option.pipelines,
                    shard=self.first.shard,
                    domains=sites.names if self.copies else None,
                    copies=self.copies,
                    copy_every=self.copy_every,
                )
                for option in pool
            ]
            return choose_among(evaluators, program, effort=QUICK, compare=False)

        pools = [(found.best, found.why_not)]
        if not found.why_not:
            pools.append((found.others, f"{self.first.schedule} does not fit the memory"))
        refusals: list[PlanError] = []
        for pool, why_not in pools:
            # If one search over all options finds nothing that fits the memory, each option is searched alone.
            for part in (pool, *((option,) for option in pool)):
                try:
                    choice = chosen(part)
                except PlanError as error:
                    # Without its frames, which would keep the evaluators alive.
                    refusals.append(error.with_traceback(None))
                    continue
                return _Answer(choice.plan, choice.schedule, self._why(choice.plan, why_not, len(pattern)))
        # The second refusal is of the option with the most ranks.
        raise PlanError(f"no plan for {counted(len(pattern), 'rank')}: {refusals[1]}") from refusals[1]

    def _packed(self, profile: Profile, sites: Sites, frozen_cost: float) -> _Answer | None:
        """None if Algorithm 1 has no plan that fits the memory with its copies."""
        on, ranks = self._profile_on(profile, sites), len(sites.domains)
        first = replace(self.first, frozen=self.released)
        try:
            plan, schedule = packed(on, first, ranks, frozen=self.frozen, frozen_cost=frozen_cost)
        except PlanError:
            return None
        plan = self.with_standbys(plan, sites.names)
        prediction = predict(on, plan, schedule)
        if not prediction.fits:
            return None
        return _Answer(_with_prediction(plan, prediction), schedule, self._why(plan, "", ranks))

    @property
    def _as_cut(self) -> bool:
        """Whether as many layers are frozen as `first` was cut for, and none of their outputs are kept."""
        return self.frozen == self.first_frozen and not min(self.kept, self.frozen)

    def _by_parameters(self, found: ShapeOptions, sites: Sites) -> _Answer:
        first, pattern = self.first, sites.domains

        def order(option: Option) -> tuple[float, int]:
            windows = -(-first.replicas // option.pipelines)
            shape = option.shape
            step = _fill_and_drain(shape.ranks, shape.chunks, windows * first.microbatches)
            return step, -option.pipelines

        best = min(found.best, key=order)
        if best not in self._cut:
            plan = unmeasured_plan(
                best.shape.schedule,
                self.parameters,
                replicas=first.replicas,
                pipelines=best.pipelines,
                shard=first.shard,
                recompute=first.recompute,
            )
            plan = replace(plan, frozen=self.released)
            self._cut[best] = plan, self._schedule_of(plan)
        plan, schedule = self._cut[best]
        plan = self.with_standbys(plan, sites.names)
        return _Answer(plan, schedule, self._why(plan, found.why_not, len(pattern)))

    def _why(self, plan: Plan, why_not: str, ranks: int) -> str:
        summary = f"{counted(plan.layers[-1][1], 'layer')} on {counted(plan.world_size, 'rank')}"
        if plan.pipeline_count < plan.replicas:
            summary += f" in {counted(plan.pipeline_count, 'pipeline')} for {plan.replicas} replicas"
        summary += f", cut by {plan.partition}"
        if plan.schedule != self.first.schedule:
            summary += f"; {plan.schedule}, as {why_not}"
        if plan.world_size < ranks:
            summary += f"; {counted(ranks - plan.world_size, 'rank')} to spare"
        return summary

    def _prediction(self, plan: Plan, schedule: Schedule, sites: Sites) -> Prediction | None:
        """None without a profile."""
        if self.profile is None:
            return None
        return predict(self._profile_on(self.profile, sites), plan, schedule)

    def profile_on(self, domains: Sequence[str], slowdowns: Sequence[float | None] | None = None) -> Profile:
        """The profile of a cluster of ranks in `domains`; only for a job with a profile."""
        assert self.profile is not None
        return self._profile_on(self.profile, Sites.of(domains, slowdowns))

    def _profile_on(self, profile: Profile, sites: Sites) -> Profile:
        cluster = resized(profile.cluster, sites.domains, sites.slowdowns)
        cluster = with_links_of(cluster, profile.cluster, self.linked)
        cluster = with_slow_links(limited(cluster, self.limits), self.links)
        return replace(profile, model=self._model, cluster=cluster)

    @cached_property
    def _model(self) -> ModelProfile:
        """The profile's model with the layers that are frozen now."""
        assert self.profile is not None
        return self.profile.with_prefix(self.frozen, self.released, min(self.kept, self.frozen)).model

    def _step_s(self, plan: Plan, schedule: Schedule, sites: Sites) -> float:
        """The predicted step; without a profile, in units of one microbatch on one rank that holds the whole model."""
        missing = plan.world_size - len(sites.domains)
        if missing > 0:
            slowdowns = None if sites.slowdowns is None else (*sites.slowdowns, *(None,) * missing)
            # Standbys are chosen by now: zones make no difference any more.
            sites = Sites((*sites.domains, *sites.domains[-1:] * missing), slowdowns)
        prediction = self._prediction(plan, schedule, sites.first(plan.world_size))
        if prediction is None:
            microbatches = max(plan.shares, default=plan.windows * plan.microbatches)
            return _fill_and_drain(plan.pipeline_ranks, plan.chunks, microbatches)
        return prediction.step_s

    def _schedule_of(self, plan: Plan) -> Schedule:
        return schedule_after(self.schedule, plan)


def _with_prediction(plan: Plan, prediction: Prediction | None) -> Plan:
    """`plan` as predicted; None: nothing is."""
    return replace(
        plan,
        predicted_step_s=prediction and prediction.step_s,
        predicted_bubble=prediction and prediction.bubble,
        predicted_peak_memory_bytes=prediction and prediction.peak_memory_bytes,
    )


def _fill_and_drain(ranks: int, chunks: int, microbatches: int) -> float:
    """A step of balanced stages, in units of one microbatch on one rank that holds the whole model."""
    return (microbatches + (ranks - 1) / chunks) / ranks
