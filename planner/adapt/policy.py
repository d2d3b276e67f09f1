"""Whether another cut of the running pipeline pays for its move, for what is known of the ranks' speeds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.arrivals import arrivals, new_copies
from planner.freezing import Ratios
from planner.plan import Plan, PlanError
from planner.profile import Profile
from planner.repartition import repartition
from planner.repartition.slowdowns import Slowdowns
from planner.schedule.expand import schedule_after
from planner.search import recut
from planner.search.replan import Replanner
from planner.simulation.predict import Prediction, predict
from planner.wording import counted, seconds, shares_text

LEAST_GAIN = 0.03
"""Share of the step that another cut must save: less than that is lost in the noise of the prediction."""
SURE = 2.0
"""Or so many standard errors of the slowdowns, if these are more: less than that their noise may explain."""
DISTURBANCE = 0.1
"""How much longer steps take while layers move, as a share; `docs/measurements.md`, "Layers that move"."""
STALL_S = 0.1
"""What the switches of one move stall the ranks."""
IN_FORCE_STEPS = 3
"""Steps from a decision until its plan is in force: copies, hand-over, reports."""
ANSWERED_STEPS = IN_FORCE_STEPS + 1
"""Steps from a change of speed until the plan that answers it is in force."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether to move, and the numbers behind it."""

    plan: Plan | None
    """The plan to move to; None: stay."""
    reason: str
    now_s: float
    """Predicted step with the present cut, at the known speeds."""
    then_s: float
    """The same with the best cut found; as `now_s` if there is none."""
    cost_s: float = 0.0
    """What the move takes from training."""
    layers: tuple[int, ...] = ()
    """Per stage, of the best cut found."""
    too_soon: bool = False
    """Whether it would pay if the speeds lasted longer, or perhaps once they are known better."""


def decide(
    replanner: Replanner,
    now: Plan,
    domains: Sequence[str],
    slowdowns: Sequence[float | None],
    *,
    remaining_steps: int,
    lasting_steps: int,
    before: Sequence[float | None] | None = None,
    uncertainty: float = 0.0,
    predicts: Slowdowns | None = None,
    ratios: Ratios | None = None,
) -> Decision:
    """Search the best cut, order of the ranks and shares of pipelines for the known speeds, and weigh them against the
    present ones (DynPipe, Algorithm 2, lines 9 ff.). Of the plans found, the one counts that saves most over the steps
    for which it will be in force, beyond what its move costs: its transfers and switches, and the way back. For when the
    speeds become again what they were before, as those of ranks beside a neighbour that comes and goes do, the new plan
    is the wrong one until the next is in force.

    Args:
        now: the plan that the ranks follow.
        domains: failure domain by place.
        slowdowns: by place.
        remaining_steps: of the job.
        lasting_steps: how many more steps the speeds last, by what has been seen of this job.
        before: the slowdowns before the last change, by place; None: there was none.
        uncertainty: standard error of the logarithm of the slowdowns.
        ratios: frozen shares of weight gradients that are in force; None: nothing is frozen.
        predicts: the slowdowns of what places may hold; None: those of what they hold stand for all.

    Raises:
        ValueError: the job has no profile.
    """
    if replanner.profile is None:
        raise ValueError("without a profile no step can be predicted")
    try:
        search = repartition.best(replanner, now, domains, predicts or slowdowns, ratios=ratios, share=True)
    except PlanError as error:
        known = recut.predicted(replanner, now, domains, slowdowns)
        assert known is not None, "there is a profile"
        return Decision(plan=None, reason=str(error), now_s=known.step_s, then_s=known.step_s)
    present = search.now
    way_back = None
    if before is not None and lasting_steps < remaining_steps:
        way_back = _WayBack(replanner, now, domains, before, ratios)
    steps = max(0, min(remaining_steps, lasting_steps) - IN_FORCE_STEPS)
    least_gain = max(LEAST_GAIN, SURE * uncertainty)
    faster = [choice for choice in search.choices if choice.step_s < (1 - least_gain) * present.step_s]
    weighed: list[tuple[Prediction, float, float]] = []
    for choice in faster or search.choices[:1]:
        cost_s = move_cost_s(choice.profile, now, choice.plan)
        weighed.append((choice, cost_s, 0.0 if way_back is None else way_back(choice.plan, cost_s)))
    after, cost_s, back_s = min(weighed, key=lambda each: each[0].step_s * steps + each[1] + each[2])
    best = after.plan
    found = Decision(
        plan=None,
        reason="",
        now_s=present.step_s,
        then_s=after.step_s,
        cost_s=cost_s,
        layers=best.layers_per_stage,
    )
    gain_s = present.step_s - after.step_s
    steps_s = f"{seconds(present.step_s)} -> {seconds(after.step_s)}"
    said = f"expected step {steps_s} with {list(best.layers_per_stage)} layers"
    if best.stage_ranks != now.stage_ranks:
        said += f" on ranks {list(best.stage_ranks)}"
    if best.shares:
        said += f", {shares_text(best.shares)}"
    if best.same_work_as(now) or gain_s <= LEAST_GAIN * present.step_s:
        return replace(found, reason=f"no cut saves {LEAST_GAIN:.0%} of a step: {said}")
    if gain_s <= least_gain * present.step_s:
        reason = f"no cut saves the {least_gain:.0%} of a step that noise may explain: {said}"
        return replace(found, reason=reason, too_soon=True)
    over = (
        f"over {counted(steps, 'step')} that saves {gain_s * steps:.2f} s, and the move costs {cost_s:.2f} s"
    )
    if back_s:
        over += f", the way back {back_s:.2f} s"
    if gain_s * steps <= cost_s + back_s:
        return replace(
            found,
            reason=f"{said}; {over}: it does not pay",
            too_soon=gain_s * max(0, remaining_steps - IN_FORCE_STEPS) > cost_s,
        )
    return replace(found, plan=best, reason=f"{said}; {over}")


class _WayBack:
    """What it costs that a plan is the wrong one once the speeds are again what they were `before`."""

    def __init__(
        self,
        replanner: Replanner,
        now: Plan,
        domains: Sequence[str],
        before: Sequence[float | None],
        ratios: Ratios | None,
    ) -> None:
        self._replanner, self._profile, self._ratios = replanner, replanner.profile_on(domains, before), ratios
        self._stayed_s = self._step_s(now)

    def __call__(self, then: Plan, move_cost_s: float) -> float:
        """Seconds: steps that take longer than with the present plan until one that answers is in force, and another
        move; 0 if `then` is no slower."""
        lost_s = self._step_s(then) - self._stayed_s
        return ANSWERED_STEPS * lost_s + move_cost_s if lost_s > 0 else 0.0

    def _step_s(self, plan: Plan) -> float:
        return predict(
            self._profile, plan, schedule_after(self._replanner.schedule, plan), self._ratios
        ).step_s


def moved_bytes(profile: Profile, now: Plan, then: Plan) -> dict[tuple[int, int], int]:
    """(source, target) -> bytes of layer state that must move there, by place: to the layers' new owners, and after
    these own them to new standbys. The owner in the first pipeline sends it. Copies that are there already do not move.
    """
    moved: dict[tuple[int, int], int] = {}
    for owners, targets in ((now, arrivals(now, then)), (then, new_copies(now, then))):
        for layer, target in targets:
            way = owners.owners_of(layer)[0], target
            moved[way] = moved.get(way, 0) + profile.model.layers[layer].state_bytes
    return moved


def move_cost_s(profile: Profile, now: Plan, then: Plan) -> float:
    """What moving from `now` to `then` takes from training: transfers that steps run beside, and the switches."""
    links = profile.cluster
    transfers = [
        links.link(source, target).transfer_s(size)
        for (source, target), size in moved_bytes(profile, now, then).items()
    ]
    return DISTURBANCE * sum(transfers) + STALL_S
