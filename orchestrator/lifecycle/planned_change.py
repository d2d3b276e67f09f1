"""A change of ranks that is known beforehand: layers are copied to their next ranks before the generation ends. Pure.

The next plan is made and the copies are brought while the ranks train: members become standbys of what they will own,
and ranks without a place follow the owners' commits. Then they regroup, and nobody has to fetch a layer. Where time is
short, where copies do not fit, or where the job moves layers between steps (`elastic.migration`), the ranks regroup at
once and fetch what they lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.events import types as events
from orchestrator.lifecycle import moves
from orchestrator.lifecycle.effects import (
    AppendToLog,
    Ask,
    AwaitCopies,
    CopyAside,
    Effect,
    PlanAhead,
    Switch,
)
from orchestrator.lifecycle.recovery import PACKED, RecoveryPlan, lineup_of, reason_of
from orchestrator.lifecycle.states import Draft, JobData, LayersAhead, Order, PlannedChange
from orchestrator.lifecycle.stimuli import CopiesOverdue, PlannedAhead
from planner.arrivals import needed, new_copies
from planner.ir import Schedule
from planner.plan import Plan
from planner.shards import Piece
from workers.protocol.orders import Request
from workers.protocol.reports import CopiedAhead, Report, StandbyReport, SwitchReport

Changing = tuple[JobData, tuple[Effect, ...]]

PATIENCE_S = 60.0
"""Time limit for copies where no rank leaves; `cluster.timeout_s` if that is longer."""
UNKNOWN_NOTICE_S = 20.0
"""Time assumed for a notice without a deadline: a process is killed half a minute after its SIGTERM, or earlier."""
LEAST_NOTICE_S = 2.0
LEAST_NOTICE_STEPS = 4
"""With a shorter notice nothing is copied ahead: the ranks regroup at the next commit."""


def begin(order: Order, job: JobData, cause: str, wanted: int) -> Changing:
    """Have training ranks regroup for `cause`, once they have copies of what they will own.

    Args:
        wanted: how many places the job is to have.
    """
    there, intents = job.membership, job.intents
    if intents.pausing or (intents.asked is not None and (intents.asked == cause or intents.change)):
        return job, ()
    lineup = lineup_of(there.members, there.alive, there.going, wanted)
    at_once = order.elastic.migration == "stop" or there.hurried & there.going
    at_once = at_once or len(lineup) < order.elastic.min_ranks
    if at_once:
        return _regroup(replace(job, intents=replace(intents, change=None)), cause)
    if intents.change is not None and intents.change.lineup == lineup:
        return job, ()
    change = PlannedChange(number=there.changes + 1, cause=cause, lineup=lineup)
    job = replace(
        job,
        membership=replace(there, changes=change.number),
        intents=replace(intents, change=change),
    )
    timer = () if there.going else (AwaitCopies(_most_s(order), change=change.number),)
    job, planning = _plan(job)
    return job, (*timer, *planning)


def _most_s(order: Order) -> float:
    return max(PATIENCE_S, order.timeout_s)


def patience_s(job: JobData, left_s: float | None) -> float:
    """Time limit for copies after a notice: half of the time that is left. 0: regroup at once."""
    if left_s is None:
        return UNKNOWN_NOTICE_S / 2
    if left_s < max(LEAST_NOTICE_S, LEAST_NOTICE_STEPS * job.progress.step_s):
        return 0.0
    return left_s / 2


def _plan(job: JobData) -> Changing:
    """Have the next plan made, unless a move of layers is under way: that one is finished first."""
    change, there = job.intents.change, job.membership
    assert change is not None
    if job.intents.migration is not None:
        return job, ()
    progress = job.progress
    change = replace(change, planning=True, prefix=progress.prefix_told, frozen=progress.frozen)
    job = replace(job, intents=replace(job.intents, change=change))
    ahead = PlanAhead(
        now=job.progress.plan,
        members=there.members,
        lineup=change.lineup,
        domains={rank: there.domain(rank) for rank in {*there.members, *change.lineup}},
        reason=PACKED if change.cause == "pack" else reason_of(there.members, change.lineup, there.alive),
        number=change.number,
    )
    return job, (ahead,)


def planned(order: Order, job: JobData, answer: PlannedAhead) -> Changing:
    """The next plan is known: have the ranks bring the copies that it needs."""
    change = job.intents.change
    if change is None or change.number != answer.number or job.intents.asked is not None:
        return job, ()
    if change.cause == "pack" and (answer.plan is None or answer.schedule is None):
        # The layout that the job has is as good as ever.
        job = replace(job, progress=replace(job.progress, packed_for=change.prefix))
        return replace(job, intents=replace(job.intents, change=None)), ()
    if answer.plan is None or answer.schedule is None:
        return _regroup(replace(job, intents=replace(job.intents, change=None)), change.cause)
    change = replace(change, plan=answer.plan, schedule=answer.schedule)
    job = replace(job, intents=replace(job.intents, change=change))
    if answer.copying is None:
        text = f"layers are fetched while the job waits, and not copied ahead: {answer.why}"
        job, effects = _regroup(job, change.cause)
        return job, (AppendToLog(events.Warned(text=text)), *effects)
    warned: tuple[Effect, ...] = ()
    if answer.why:
        text = f"layers are built while the job waits, and not beside training: {answer.why}"
        warned = (AppendToLog(events.Warned(text=text)),)
    job, asking = _copy(order, job, answer.copying, answer.building)
    job, regrouping = _once_complete(job)
    return job, (*warned, *asking, *regrouping)


def _copy(order: Order, job: JobData, copying: Plan, building: Mapping[int, tuple[Piece, ...]]) -> Changing:
    """Have members, and ranks without a place, bring what they lack of the next plan, and build what they have no
    modules for."""
    change, ahead, there = job.intents.change, job.intents.ahead, job.membership
    assert change is not None
    assert change.plan is not None
    effects: tuple[Effect, ...] = ()
    members = frozenset(there.members)
    waiting = frozenset(place for _, place in new_copies(job.progress.plan, copying))
    waiting |= {place for place, rank in enumerate(there.members[: copying.world_size]) if rank in building}
    if waiting or ahead.ranks & members:
        ahead = LayersAhead(
            ranks=(ahead.ranks - members) | (members & building.keys()),
            before=ahead.before or job.progress.plan,
        )
        version = job.progress.version + 1
        why = "copies for the next generation: " + change.plan.reason
        copying = replace(copying, epoch=order.epoch, version=version, reason=why)
        job = replace(job, progress=replace(job.progress, version=version))
        change = replace(change, copying=copying, waiting=waiting)
        switch = Switch(copying, job.progress.schedule, (), there.members, job.progress.generation, building)
        effects = (AppendToLog(events.Issued(plan=copying)), switch)
    if pieces := _lacking(job, change):
        ahead = replace(ahead, ranks=ahead.ranks | frozenset(pieces))
        change = replace(change, coming=frozenset(pieces))
        aside = CopyAside(
            pieces=pieces,
            building={rank: building[rank] for rank in pieces if rank in building},
            freeze=job.progress.freeze,
            epoch=order.epoch,
            change=change.number,
            generation=job.progress.generation,
            patience_s=2 * _most_s(order),
        )
        effects = (*effects, aside)
    return replace(job, intents=replace(job.intents, change=change, ahead=ahead)), effects


def _lacking(job: JobData, change: PlannedChange) -> dict[int, dict[Piece, int]]:
    """Per rank without a place now, the layers, or shards, of which is made what it will own or keep a copy of, and the
    owner of each."""
    now, then, members = job.progress.plan, change.plan, job.membership.members
    assert then is not None
    return {
        rank: {piece: members[now.owner_of(piece)] for piece in needed(now, then, place)}
        for place, rank in enumerate(change.lineup[: then.world_size])
        if rank not in members
    }


def take_report(order: Order, job: JobData, report: Report) -> Changing:
    """Apply a rank's report to the change under way; once all copies are up to date, have the ranks regroup."""
    change = job.intents.change
    if change is None or job.intents.asked is not None:
        return job, ()
    if not change.planning:
        return _plan(job)
    copying = change.copying
    match report:
        case SwitchReport(rank=place) if copying and (report.epoch, report.version) == copying.key:
            change = replace(change, reached={**change.reached, place: report.step})
            if len(change.reached) == len(job.membership.members):
                job = replace(job, progress=replace(job.progress, plan=copying))
        # One of the switch's own step is of the copies before it.
        case StandbyReport(rank=place, snapshot=False, built=True) if report.step > change.reached.get(
            place, report.step
        ):
            change = replace(change, waiting=change.waiting - {place})
        case CopiedAhead(rank=rank) if (report.epoch, report.change) == (order.epoch, change.number):
            if report.error is not None:
                text = f"rank {rank} fetches its layers while the job waits: {report.error}"
                job, effects = _regroup(job, change.cause)
                return job, (AppendToLog(events.Warned(text=text)), *effects)
            change = replace(change, coming=change.coming - {rank}, there=change.there | {rank})
        case _:
            return job, ()
    return _once_complete(replace(job, intents=replace(job.intents, change=change)))


def _once_complete(job: JobData) -> Changing:
    """Have the ranks regroup, if all copies are up to date."""
    change = job.intents.change
    assert change is not None
    following = change.copying is None or len(change.reached) == len(job.membership.members)
    if change.waiting or change.coming or not following:
        return job, ()
    return _regroup(job, change.cause)


def let_go(order: Order, job: JobData) -> Changing:
    """Have ranks let go of what they copied and built for a generation that does not come, or has formed without them.

    A member follows the plan from before the copies again, which voids what it builds. While a
    change is under way members keep what they have, and all ranks do where they regroup or end.
    """
    intents, there, ahead = job.intents, job.membership, job.intents.ahead
    if ahead == LayersAhead() or intents.asked is not None or intents.pausing or intents.stopping:
        return job, ()
    change, effects = intents.change, tuple[Effect, ...]()
    free = ahead.ranks & there.idle - frozenset(() if change is None else change.lineup)
    if free:
        # A number of its own: an order from before that comes later is known as such.
        there = replace(there, changes=there.changes + 1)
        effects = (
            CopyAside(
                pieces={rank: {} for rank in sorted(free)},
                building={},
                freeze=(),
                epoch=order.epoch,
                change=there.changes,
                generation=job.progress.generation,
                patience_s=0.0,
            ),
        )
    progress = job.progress
    if change is None and ahead.before is not None:
        plan = moves.numbered(
            order, job, ahead.before, "the change of ranks is cancelled: the ranks drop its copies"
        )
        switch = Switch(plan, progress.schedule, (), there.members, progress.generation)
        # At once: nobody may count any longer on copies that go.
        progress = replace(progress, plan=plan, version=plan.version)
        effects = (*effects, AppendToLog(events.Issued(plan=plan)), switch)
    left = LayersAhead() if change is None else replace(ahead, ranks=(ahead.ranks & there.alive) - free)
    return replace(job, membership=there, progress=progress, intents=replace(intents, ahead=left)), effects


def formed(job: JobData, members: tuple[int, ...]) -> JobData:
    """`job` whose next generation has formed: its members have used, or dropped, what they built."""
    ahead = LayersAhead(ranks=job.intents.ahead.ranks - frozenset(members))
    return replace(job, intents=replace(job.intents, change=None, ahead=ahead))


def hurry(job: JobData, stimulus: CopiesOverdue) -> JobData:
    """`job` with those of its leaving ranks whose time is running out."""
    there = job.membership
    return replace(job, membership=replace(there, hurried=there.hurried | (stimulus.ranks & there.going)))


def overdue(job: JobData, stimulus: CopiesOverdue) -> Changing:
    """Have training ranks regroup with the copies that there are, if the change has no more time."""
    job, change = hurry(job, stimulus), job.intents.change
    if change is None or job.intents.asked is not None:
        return job, ()
    if change.number != stimulus.change and not (job.membership.hurried & job.membership.going):
        return job, ()
    return _regroup(job, change.cause)


def _regroup(job: JobData, cause: str) -> Changing:
    if job.intents.pausing or job.intents.stopping:
        return job, ()
    job = replace(job, intents=replace(job.intents, asked=cause))
    return job, (Ask(Request.REGROUP, job.membership.members[0]),)


def lineup(job: JobData) -> tuple[int, ...]:
    """The ranks for which the next generation's plan was made, by place; empty: there is none."""
    change = job.intents.change
    if change is None or change.plan is None or job.intents.asked != change.cause:
        return ()
    return change.lineup


def instead(order: Order, job: JobData, recovery_plan: RecoveryPlan) -> tuple[JobData, Plan, Schedule] | None:
    """Return the plan that was made ahead for the next generation, if it fits."""
    change = job.intents.change
    if change is None or change.plan is None or change.schedule is None:
        return None
    if recovery_plan.lineup != lineup(job) or recovery_plan.cause != change.cause:
        return None
    if job.progress.frozen < change.frozen:  # layers have thawed, for which it has no memory
        return None
    carried = recovery_plan.carried
    if carried is not None and carried.prefix.layers < change.plan.frozen:  # nor a backward pass
        return None
    version = job.progress.version + 1
    plan = replace(change.plan, epoch=order.epoch, version=version)
    return replace(job, progress=replace(job.progress, version=version)), plan, change.schedule


def at_hand(job: JobData, draft: Draft) -> dict[int, tuple[Piece, ...]]:
    """Return rank -> the layers, or shards, that ranks without a place have copied ahead for the plan of `draft`."""
    change = job.intents.change
    if change is None or change.plan is None or draft.recovery_plan.lineup != change.lineup:
        return {}
    if not change.plan.same_work_as(draft.plan):
        return {}
    return {
        rank: needed(job.progress.plan, draft.plan, place)
        for place, rank in enumerate(draft.members)
        if rank in change.there
    }
