"""Whether another cut of the running pipeline pays for its move, for what is known of the ranks' speeds. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.arrivals import arrivals, copied_ahead, new_copies
from planner.freezing import Ratios
from planner.plan import Plan, PlanError
from planner.profile import Profile
from planner.repartition import repartition
from planner.repartition.repartition import FoundPlan
from planner.repartition.slowdowns import SlowdownModel
from planner.schedule.expand import schedule_after
from planner.search import recut
from planner.search.replan import Replanner
from planner.simulation.predict import Prediction, predict
from planner.simulation.shard_parts import sent_bytes
from planner.simulation.snapshot_cost import DISTURBANCE
from planner.simulation.traffic_cost import stream_s_per_byte
from planner.wording import counted, seconds, shares_text

LEAST_GAIN = 0.03
"""Share of the step that another cut must save: less than that is lost in the noise of the prediction."""
SURE = 2.0
"""Or so many standard errors of the slowdowns, if these are more: less than that their noise may explain."""
STALL_S = 0.1
"""Stall of the ranks by the switches of one move."""
IN_FORCE_STEPS = 3
"""Steps from a decision until its plan is in force: copies, hand-over, reports."""
ANSWERED_STEPS = IN_FORCE_STEPS + 1
"""Steps from a change of speed until the plan that answers it is in force."""
BOTH_STEPS = 200
"""Horizon, in steps, of a move chosen for the average of alternating speeds."""


@dataclass(frozen=True, kw_only=True)
class MoveDecision:
    """Whether to move, and the numbers behind it."""

    plan: Plan | None
    """The plan to move to; None: stay."""
    reason: str
    now_s: float
    """Predicted step with the present cut, at the known speeds."""
    then_s: float
    """The same with the best cut found; as `now_s` if there is none."""
    cost_s: float = 0.0
    """Training time that the move costs."""
    layers: tuple[int, ...] = ()
    """Per stage, of the best cut found."""
    too_soon: bool = False
    """Whether it would pay if the speeds lasted longer, or perhaps once they are known better."""


@dataclass(frozen=True, kw_only=True)
class SpeedForecast:
    """Forecast of the ranks' speeds: how long the present ones last and which come after, by what the job has seen.

    Speeds that were others before will be so again, as beside a neighbour that comes and goes: a plan for the present
    ones is then the wrong one until the next is in force, and that move costs as well. Or the plan stays through both
    speeds, and saves what it saves on their mean.
    """

    remaining_steps: int
    """Steps of the job that remain."""
    lasting_steps: int
    """Steps that the speeds still last."""
    before: Sequence[float | None] | None = None
    """The slowdowns before the last change, by place; None: there was none."""
    share: float = 0.5
    """Share of the time that has the present speeds, where these and those before come and go in turn."""
    uncertainty: float = 0.0
    """Standard error of the logarithm of the slowdowns."""

    @property
    def steps(self) -> int:
        """Steps of a move's plan at the present speeds."""
        return max(0, min(self.remaining_steps, self.lasting_steps) - IN_FORCE_STEPS)

    @property
    def both_steps(self) -> int:
        """Steps of a move's plan that stays through both speeds."""
        return max(0, min(self.remaining_steps, BOTH_STEPS) - IN_FORCE_STEPS)

    @property
    def least_gain(self) -> float:
        """Share of the step that another cut must save."""
        return max(LEAST_GAIN, SURE * self.uncertainty)


def decide(
    replanner: Replanner,
    now: Plan,
    domains: Sequence[str],
    slowdowns: Sequence[float | None],
    forecast: SpeedForecast,
    *,
    predicts: SlowdownModel | None = None,
    ratios: Ratios | None = None,
    r_max: float | None = None,
) -> MoveDecision:
    """Search the best cut, order of the ranks and shares of pipelines for the known speeds, and weigh them against the
    present ones (DynPipe, Algorithm 2, lines 9 ff.). Of the plans found, the one counts that saves most beyond what its
    move costs, and for whose layers there is room beside those that places hold until they have moved.

    Args:
        now: the plan that the ranks follow.
        domains: failure domain by place.
        slowdowns: by place.
        predicts: the slowdowns of what places may hold; None: those of what they hold stand for all.
        ratios: frozen shares of weight gradients that are in force; None: nothing is frozen.
        r_max: largest mean freeze ratio of a stage, if the freeze program is solved again for the plan that is taken,
            and for the present one: then each counts with its own ratios.

    Raises:
        ValueError: the job has no profile.
    """
    try:
        search = repartition.best(
            replanner, now, domains, predicts or slowdowns, ratios=ratios, r_max=r_max, share=True
        )
    except PlanError as error:
        known = recut.predicted(replanner, now, domains, slowdowns)
        assert known is not None, "there is a profile"
        return MoveDecision(plan=None, reason=str(error), now_s=known.step_s, then_s=known.step_s)
    present = search.now
    worth = _Worth(replanner, present, domains, forecast)
    faster = [
        choice for choice in search.choices if choice.step_s < (1 - forecast.least_gain) * present.step_s
    ]
    weighed = [(choice, worth(choice)) for choice in faster or search.choices[:1]]
    weighed.sort(key=lambda each: each[1][0], reverse=True)
    chosen = next(
        (
            (choice, value)
            for choice, value in weighed
            if not faster or value[0] <= 0 or _has_room(replanner, now, choice.plan, domains)
        ),
        None,
    )
    after, (worth_s, cost_s, over) = chosen or weighed[0]
    found = MoveDecision(
        plan=None,
        reason=_expected(search, now, after),
        now_s=present.step_s,
        then_s=after.step_s,
        cost_s=cost_s,
        layers=after.plan.layers_per_stage,
    )
    return _judged(found, now, after.plan, forecast, worth_s, over, room=chosen is not None)


def _expected(search: FoundPlan, now: Plan, after: Prediction) -> str:
    """The step that `after` promises, and how its plan differs from `now`."""
    best = after.plan
    steps_s = f"{seconds(search.now.step_s)} -> {seconds(after.step_s)}"
    said = f"expected step {steps_s} with {list(best.layers_per_stage)} layers"
    if best.stage_ranks != now.stage_ranks:
        said += f" on ranks {list(best.stage_ranks)}"
    if best.shares:
        said += f", {shares_text(best.shares)}"
    return said + (", each with its own freeze ratios" if search.own_ratios else "")


def _judged(
    found: MoveDecision,
    now: Plan,
    best: Plan,
    forecast: SpeedForecast,
    worth_s: float,
    over: str,
    *,
    room: bool,
) -> MoveDecision:
    """`found`, with `best` as its plan if that pays.

    Args:
        found: whose reason says what is expected of `best`.
        over: what `best` is worth, in words.
        room: whether the places have room for its layers.
    """
    said, gain_s = found.reason, found.now_s - found.then_s
    if best.same_work_as(now) or gain_s <= LEAST_GAIN * found.now_s:
        return replace(found, reason=f"no cut saves {LEAST_GAIN:.0%} of a step: {said}")
    if gain_s <= forecast.least_gain * found.now_s:
        reason = f"no cut saves the {forecast.least_gain:.0%} of a step that noise may explain: {said}"
        return replace(found, reason=reason, too_soon=True)
    if worth_s <= 0:
        lasting_s = gain_s * max(0, forecast.remaining_steps - IN_FORCE_STEPS)
        reason = f"{said}; {over}: it does not pay"
        return replace(found, reason=reason, too_soon=lasting_s > found.cost_s)
    if not room:
        lacking = "but places have no room for the layers that would come beside their own"
        return replace(found, reason=f"{said}; {over}; {lacking}")
    return replace(found, plan=best, reason=f"{said}; {over}")


def _has_room(replanner: Replanner, now: Plan, then: Plan, domains: Sequence[str]) -> bool:
    """Whether the places of `now` can hold what they own and keep under `then` beside their present layers."""
    places = range(now.world_size)
    try:
        replanner.check_memory(copied_ahead(now, places, then, places), domains, now, then)
    except PlanError:
        return False
    return True


class _Worth:
    """Worth of a move, in seconds of training, under the foreseen speeds of the ranks."""

    def __init__(
        self, replanner: Replanner, present: Prediction, domains: Sequence[str], forecast: SpeedForecast
    ) -> None:
        self._replanner, self._present = replanner, present
        self._forecast = forecast
        self._before = None
        if forecast.before is not None and forecast.lasting_steps < forecast.remaining_steps:
            self._before = replanner.profile_on(domains, forecast.before)
            # What is frozen is still what suits the present speeds, until the next plan is in force.
            self._before_s = self._step_s(self._before, present)

    def __call__(self, choice: Prediction) -> tuple[float, float, str]:
        """(seconds saved beyond all costs, seconds that the move takes, both in words)."""
        present, steps, share = self._present, self._forecast.steps, self._forecast.share
        gain_s = present.step_s - choice.step_s
        cost_s = move_cost_s(choice.profile, present.plan, choice.plan)
        saved = f"that saves {gain_s * steps:.2f} s, and the move costs {cost_s:.2f} s"
        over = f"over {counted(steps, 'step')} {saved}"
        worth_s = gain_s * steps - cost_s
        if self._before is None:
            return worth_s, cost_s, over
        before_s = self._before_s
        lost_s = self._step_s(self._before, choice) - before_s
        # Of both speeds in turn. With equal shares, what is gained by staying is lost by moving back.
        mean_s = share * gain_s - (1 - share) * lost_s
        both_steps = self._forecast.both_steps
        kept_s = mean_s * both_steps - cost_s
        if lost_s > 0:
            back_s = ANSWERED_STEPS * lost_s + cost_s
            worth_s, over = worth_s - back_s, f"{over}, the way back {back_s:.2f} s"
        least_s = LEAST_GAIN * (share * present.step_s + (1 - share) * before_s)
        if mean_s > least_s and kept_s > worth_s:
            over = f"over {counted(both_steps, 'step')} of speeds that come and go"
            over = f"{over} that saves {mean_s * both_steps:.2f} s"
            return kept_s, cost_s, f"{over}, and the move costs {cost_s:.2f} s"
        return worth_s, cost_s, over

    def _step_s(self, profile: Profile, choice: Prediction) -> float:
        plan = choice.plan
        return predict(profile, plan, schedule_after(self._replanner.schedule, plan), choice.ratios).step_s


def moved_bytes(profile: Profile, now: Plan, then: Plan) -> dict[tuple[int, int], int]:
    """(source, target) -> bytes of layer state that must move there, by place: to the layers' new owners, and after
    these own them to new standbys. Of a whole layer the owner in the first pipeline sends it. Copies that are there
    already do not move. Where states are shared out, each place gets its shard; the weights that it computes with come
    as in every step.
    """
    moved: dict[tuple[int, int], float] = {}
    for owners, targets in ((now, arrivals(now, then)), (then, new_copies(now, then))):
        for piece, target in targets:
            way = owners.owner_of(piece), target
            moved[way] = moved.get(way, 0) + sent_bytes(profile.model.layers[piece.layer], piece)
    return {way: round(size) for way, size in moved.items()}


def move_cost_s(profile: Profile, now: Plan, then: Plan) -> float:
    """Training time that a move from `now` to `then` costs: transfers beside running steps, the time they take from
    ranks that compute on the host, and the switches."""
    links = profile.cluster
    moved = moved_bytes(profile, now, then)
    transfers = [links.link(source, target).transfer_s(size) for (source, target), size in moved.items()]
    working_s: dict[int, float] = defaultdict(float)
    for way, size in moved.items():
        for place in way:
            working_s[place] += size * stream_s_per_byte(links.devices[place])
    return max(working_s.values(), default=0.0) + DISTURBANCE * sum(transfers) + STALL_S
