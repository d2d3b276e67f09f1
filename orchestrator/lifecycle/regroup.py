"""From the end of one generation to the next one's training: assess, decide, settle, plan, follow, host, join, train.

The part of the lifecycle that a loss at any point starts again. Pure, like `machine.py`, whose table leads here.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.events import types as events
from orchestrator.lifecycle import moves
from orchestrator.lifecycle.commands import (
    Ask,
    Assess,
    Command,
    Dismiss,
    Follow,
    HostStore,
    Join,
    Log,
    LogRegroup,
    MakePlan,
    Propose,
    Release,
    Save,
    Settle,
    Train,
    Wait,
    Weigh,
)
from orchestrator.lifecycle.recovery import Abort, Pause, RecoveryPlan, Rescue, Situation, decide, rescue
from orchestrator.lifecycle.reports import with_freeze
from orchestrator.lifecycle.states import (
    Assessing,
    Closing,
    Draft,
    Failed,
    Finished,
    Hosting,
    Joining,
    Loading,
    Order,
    Planning,
    Roster,
    Saving,
    Settling,
    State,
    Stopping,
    Training,
    Waiting,
)
from orchestrator.lifecycle.stimuli import (
    Joined,
    Loaded,
    Planned,
    Positioned,
    RankLost,
    Settled,
    StoreUp,
    Unplannable,
)
from orchestrator.quantities import counted
from workers.protocol import Assignment, DamagedCheckpoint, FreezeStarted, Generation, Request

Step = tuple[State, tuple[Command, ...]]


def assess(order: Order, roster: Roster, troubles: tuple[RankLost, ...]) -> Step:
    """The generation, or the one that was to follow it, is over: ask everyone who lives."""
    for loss in troubles:
        if loss.dead:
            roster = without(roster, loss.rank)
    asked = None if troubles else roster.asked
    roster, void = moves.ended(replace(roster, round=roster.round + 1, asked=asked, pausing=False))
    logs = (*(log_loss(loss) for loss in troubles if not loss.cut_off), *void)
    after, commands = _decided(order, Assessing(roster, roster.alive, (), troubles))
    return after, (*logs, Assess(roster.alive, roster.round, roster.generation), *commands)


def positioned(order: Order, state: Assessing, stimulus: Positioned) -> Step:
    """One more has told where it stands."""
    waiting = state.waiting - {stimulus.position.rank}
    return _decided(order, replace(state, waiting=waiting, positions=(*state.positions, stimulus.position)))


def heard_of_loss(order: Order, state: Assessing, loss: RankLost) -> Step:
    """One more is dead, or tells why its training failed."""
    logs: tuple[Command, ...] = () if loss.cut_off else (log_loss(loss),)
    spares = state.roster.idle - state.roster.tried if loss.dead else frozenset[int]()
    aside = loss.rank in state.roster.starting | spares
    if aside or loss.dead:
        state = replace(state, roster=without(state.roster, loss.rank), waiting=state.waiting - {loss.rank})
        left = tuple(position for position in state.positions if position.rank != loss.rank)
        state = replace(state, positions=left)
    if aside:
        logs = (*logs, Dismiss(frozenset({loss.rank})))
    else:
        roster = replace(state.roster, asked=None)
        state = replace(state, roster=roster, troubles=(*state.troubles, loss))
    after, commands = _decided(order, state)
    return after, (*logs, *commands)


def _decided(order: Order, state: Assessing) -> Step:
    """What is decided once all have told."""
    if state.waiting:
        return state, ()
    roster = state.roster
    decision = decide(
        Situation(
            plan=roster.plan,
            members=roster.members,
            positions={position.rank: position for position in state.positions},
            tried=roster.tried,
            going=roster.going,
            step=roster.step,
            checkpoints=roster.checkpoints,
            wanted=order.wanted,
            elastic=order.elastic,
            asked=roster.asked,
            trouble=_words(state.troubles),
            failures=roster.failures,
            failed_at=roster.failed_at,
            trained=roster.trained,
            interrupted=roster.interrupted,
        )
    )
    match decision:
        case Abort(reason=reason, rescue=Rescue() as rescued):
            return Saving(roster, rescued.step, reason), (_save(roster, rescued),)
        case Abort(reason=reason):
            return close(Failed(reason, user_error=False))
        case Pause():
            failed = replace(
                roster, failures=decision.failures, failed_at=max(roster.failed_at, decision.step)
            )
            return hold(order, failed, decision)
        case RecoveryPlan() as recovery_plan:
            pass
    taken_up = [plan for position in state.positions for plan in position.freeze_plans]
    freeze = with_freeze(roster.freeze, taken_up)
    logs = [Log(FreezeStarted(plan=plan)) for plan in freeze if plan not in roster.freeze]
    proposed = None if logs else roster.proposed
    roster = replace(
        roster,
        failures=recovery_plan.failures,
        failed_at=max(roster.failed_at, recovery_plan.reached),
        freeze=freeze,
        proposed=proposed,
    )
    if recovery_plan.settlement is None or not recovery_plan.settling:
        after, commands = plan(order, roster, recovery_plan)
        return after, (*logs, *commands)
    settle = Settle(recovery_plan.settling, recovery_plan.settlement, roster.round)
    return Settling(roster, recovery_plan, recovery_plan.settling), (*logs, settle)


def settled(order: Order, state: Settling, stimulus: Settled) -> Step:
    """One more stands where all do."""
    waiting = state.waiting - {stimulus.rank}
    if waiting:
        return replace(state, waiting=waiting), ()
    return plan(order, state.roster, state.recovery_plan)


def plan(order: Order, roster: Roster, recovery_plan: RecoveryPlan) -> Step:
    """Find out what each rank is to be: what it was, or what the planner says."""
    if (moved := moves.instead(order, roster, recovery_plan)) is not None:
        roster, plan, schedule = moved
        loading, commands = _load(roster, Draft(recovery_plan, plan, schedule))
        return loading, (Log(events.Issued(plan=plan)), *commands)
    if recovery_plan.keep_plan:
        plan, issue = roster.plan, ()
        if (plan.epoch, plan.version) != (order.epoch, roster.version):
            roster = replace(roster, version=roster.version + 1)
            plan = replace(plan, epoch=order.epoch, version=roster.version, reason=recovery_plan.reason)
            issue = (Log(events.Issued(plan=plan)),)
        loading, commands = _load(roster, Draft(recovery_plan, plan, roster.schedule))
        return loading, (*issue, *commands)
    make = MakePlan(
        recovery_plan=recovery_plan,
        first=order.plan if recovery_plan.cause == "start" else None,
        nodes={rank: roster.nodes[rank] for rank in recovery_plan.lineup},
        epoch=order.epoch,
        version=roster.version + 1,
        round=roster.round,
    )
    return Planning(roster, recovery_plan), (make,)


def planned(order: Order, state: Planning, stimulus: Planned) -> Step:
    """The plan is logged before it is sent."""
    roster = replace(state.roster, version=stimulus.plan.version)
    alternatives = order.alternatives if state.recovery_plan.cause == "start" else ()
    loading, commands = _load(roster, Draft(state.recovery_plan, stimulus.plan, stimulus.schedule))
    return loading, (Log(events.Issued(plan=stimulus.plan, alternatives=alternatives)), *commands)


def unplannable(order: Order, state: Planning, stimulus: Unplannable) -> Step:
    """Nothing fits those who are left: more ranks might do."""
    if state.recovery_plan.cause == "start":
        return close(Failed(stimulus.reason, user_error=True))
    if order.elastic.wait_s == 0:
        return close(Failed(f"{stimulus.reason}; elastic.wait_s = 0 waits for no others", user_error=False))
    recovery_plan = state.recovery_plan
    newest = state.roster.checkpoints[0].step if state.roster.checkpoints else 0
    rescued = None
    if (
        recovery_plan.settlement is not None
        and recovery_plan.sources
        and not recovery_plan.moments
        and recovery_plan.step > newest
    ):
        rescued = rescue(
            recovery_plan.step, recovery_plan.settling, recovery_plan.settlement, recovery_plan.sources
        )
    holding = Pause(
        reason=stimulus.reason, step=recovery_plan.step, rescue=rescued, interrupted=bool(recovery_plan.rerun)
    )
    return hold(order, state.roster, holding)


def _load(roster: Roster, draft: Draft) -> Step:
    recovery_plan = draft.recovery_plan
    roster = replace(roster, tried=roster.tried | frozenset(draft.members))
    start = recovery_plan.checkpoints[0] if recovery_plan.checkpoints else None
    assignments = {
        rank: Assignment(
            place=place,
            plan=draft.plan,
            schedule=draft.schedule,
            step=recovery_plan.step,
            start=start,
            sources=recovery_plan.sources,
            moments=recovery_plan.moments[0] if recovery_plan.moments else None,
            freeze=roster.freeze,
        )
        for place, rank in enumerate(draft.members)
    }
    return Loading(roster, draft, frozenset(draft.members)), (Follow(assignments, roster.round),)


def loaded(order: Order, state: Loading, stimulus: Loaded) -> Step:
    """One more has its layers, or found the checkpoint damaged: then the one before is tried by all."""
    damage, logs = state.damage, ()
    if (
        stimulus.damage is not None and stimulus.damage not in damage
    ):  # its owner and its standbys all read it
        damage = (*damage, stimulus.damage)
        logs = (Log(events.Skipped(rank=stimulus.rank, damage=stimulus.damage)),)
    waiting = state.waiting - {stimulus.rank}
    if waiting:
        return replace(state, waiting=waiting, damage=damage), logs
    if not damage:
        host = HostStore(state.draft.members[0], state.roster.round)
        return Hosting(state.roster, state.draft), (*logs, host)
    recovery_plan = state.draft.recovery_plan
    if recovery_plan.moments:
        return _with_older_moments(state, damage[0], logs)
    damaged, *older = recovery_plan.checkpoints
    if older:
        known = tuple(ref for ref in state.roster.checkpoints if ref != damaged)
        instead = f"{damage[0].file} in {damage[0].path} {damage[0].problem}: back to the checkpoint of step"
        cost = max(0, recovery_plan.reached - older[0].step)
        recovery_plan = replace(
            recovery_plan,
            checkpoints=tuple(older),
            step=older[0].step,
            reason=f"{recovery_plan.reason}; {instead} {older[0].step}, which costs {cost} committed steps",
        )
        roster = replace(state.roster, checkpoints=known)
        loading, commands = _load(roster, replace(state.draft, recovery_plan=recovery_plan))
        return loading, (*logs, *commands)
    worst = damage[0]
    closing, commands = close(
        Failed(
            f"no checkpoint is whole: {worst.file} in {worst.path}: {worst.problem}, and there is none before"
            " it. Restore the file, or train anew in another job.output",
            user_error=True,
        )
    )
    return closing, (*logs, *commands)


def _with_older_moments(state: Loading, damage: DamagedCheckpoint, logs: tuple[Command, ...]) -> Step:
    """The weights are at hand: only the moments come from another checkpoint, or begin anew."""
    recovery_plan, (damaged, *older) = state.draft.recovery_plan, state.draft.recovery_plan.moments
    known = tuple(ref for ref in state.roster.checkpoints if ref != damaged)
    instead = f"the moments of the checkpoint of step {older[0].step}" if older else "fresh moments"
    why = f"{damage.file} in {damage.path} {damage.problem}: {instead} in their place"
    recovery_plan = replace(recovery_plan, moments=tuple(older), reason=f"{recovery_plan.reason}; {why}")
    roster = replace(state.roster, checkpoints=known)
    loading, commands = _load(roster, replace(state.draft, recovery_plan=recovery_plan))
    return loading, (*logs, *commands)


def store_up(order: Order, state: Hosting, stimulus: StoreUp) -> Step:
    """The generation is logged before it forms."""
    recovery_plan = state.draft.recovery_plan
    before, number = state.roster, state.roster.generation + 1
    # Where nobody holds the layers, what is still told of steps before comes too late.
    since = before.since if recovery_plan.sources or recovery_plan.cause == "start" else number
    roster = replace(before, generation=number, since=since)
    generation = Generation(
        number=roster.generation,
        epoch=order.epoch,
        members=state.draft.members,
        store_host=stimulus.host,
        store_port=stimulus.port,
        timeout_s=order.timeout_s,
    )
    start = recovery_plan.checkpoints[0] if recovery_plan.checkpoints else None
    logs = [Log(events.Formed(generation=generation, start=start, step=recovery_plan.step))]
    if recovery_plan.cause == "start":
        # Decided before, at commits that are still to come here: no rank will report it.
        coming = [plan for plan in order.freezing.plans if (plan.start or 0) > recovery_plan.step + 1]
        logs += [Log(FreezeStarted(plan=plan)) for plan in coming]
    joining = Joining(roster, state.draft, generation, frozenset(state.draft.members))
    return joining, (*logs, Join(generation, roster.round))


def joined(order: Order, state: Joining, stimulus: Joined) -> Step:
    """One more is in the group."""
    waiting = state.waiting - {stimulus.rank}
    if waiting:
        return replace(state, waiting=waiting), ()
    draft, recovery_plan = state.draft, state.draft.recovery_plan
    before = state.roster
    roster = replace(
        before,
        members=draft.members,
        tried=frozenset(),
        plan=draft.plan,
        schedule=draft.schedule,
        trained=True,
        step=min(before.step, recovery_plan.step),
        early=before.early if recovery_plan.sources else (),
        began=recovery_plan.step,
        validated=min(before.validated, recovery_plan.step),
        asked=None,
        paused=False,
        out_of_patience=False,
        interrupted=False,
    )
    training, commands = train(order, roster, step=recovery_plan.step)
    if recovery_plan.cause == "start":
        return training, commands
    regrouped = events.Regrouped(
        generation=state.generation.number,
        cause="capacity" if before.paused and recovery_plan.cause != "resume" else recovery_plan.cause,
        reason=recovery_plan.reason,
        lost=tuple(rank for rank in before.members if rank not in draft.members),
        joined=tuple(rank for rank in draft.members if rank not in before.members),
        step=recovery_plan.step,
        rerun=recovery_plan.rerun,
        steps_lost=max(0, recovery_plan.reached - recovery_plan.step),
        detect_s=0.0,
        settle_s=0.0,
        plan_s=0.0,
        move_s=0.0,
        resume_s=0.0,
    )
    return training, (commands[0], LogRegroup(regrouped), *commands[1:])


def train(order: Order, roster: Roster, *, step: int, under_way: bool = False) -> Step:
    """Have the members train, and bring up what could not ride in an earlier generation's commits."""
    members = roster.members
    commands: list[Command] = [Train(members, step, roster.round, under_way)]
    if roster.proposed is not None:
        commands.append(Propose(roster.proposed, members))
    if roster.save_after is not None:
        commands.append(Ask(Request.CHECKPOINT, members[0]))
        roster = replace(roster, save_after=step)
    if roster.stopping:
        commands.append(Ask(Request.STOP, members[0]))
    roster, asking = ask_pause(roster)
    roster, leaving = send_off(order, roster)
    commands += [*asking, *leaving]
    if roster.stopping:
        return Stopping(roster, frozenset(members)), tuple(commands)
    return Training(roster, frozenset(members)), (*commands, *weigh(order, roster))


def ask_pause(roster: Roster) -> tuple[Roster, tuple[Command, ...]]:
    """Have the ranks of a generation end for the pause that was requested, if one was."""
    if not roster.halting or roster.stopping or roster.pausing:
        return roster, ()
    return replace(roster, pausing=True), (Ask(Request.STOP, roster.members[0]),)


def send_off(order: Order, roster: Roster) -> tuple[Roster, tuple[Command, ...]]:
    """Let go who is to go: at once without a place, at a regroup with one. If nobody is left, they end as for a stop,
    with a checkpoint of that very step."""
    free = roster.going - frozenset(roster.members)
    commands: tuple[Command, ...] = (Dismiss(free),) if free else ()
    for rank in free:
        roster = without(roster, rank)
    if not roster.going or roster.asked == "drain" or roster.pausing:
        return roster, commands
    first = roster.members[0]
    if roster.alive - roster.going:
        return replace(roster, asked="drain"), (*commands, Ask(Request.REGROUP, first))
    return replace(roster, pausing=True), (*commands, Ask(Request.STOP, first))


def weigh(order: Order, roster: Roster) -> tuple[Command, ...]:
    """Ask whether to take in who stands idle, once all who were called are there."""
    if not order.elastic.grow or roster.starting or roster.asked:
        return ()
    ranks = (*roster.members, *sorted(roster.idle))[: order.wanted]
    if len(ranks) <= len(roster.members):
        return ()
    domains = tuple(roster.nodes.get(rank, "") for rank in ranks)
    return (Weigh(roster.plan, domains, roster.step, roster.round),)


def hold(order: Order, roster: Roster, holding: Pause) -> Step:
    """Wait for capacity, once for all of a pause; what no checkpoint has is written meanwhile."""
    roster = replace(roster, interrupted=holding.interrupted)
    rescued = holding.rescue
    state = Waiting(
        roster, holding.reason, holding.step, saving=rescued.step if rescued is not None else None
    )
    save = (_save(roster, rescued),) if rescued is not None else ()
    if roster.out_of_patience:
        after, commands = out_of_patience(order, state)
        return after, (*save, *commands)
    if roster.paused:
        return state, save
    roster = replace(roster, paused=True, pauses=roster.pauses + 1)
    paused = Log(events.Paused(reason=holding.reason, step=holding.step))
    return replace(state, roster=roster), (paused, *save, Wait(order.elastic.wait_s, roster.pauses))


def out_of_patience(order: Order, state: Waiting) -> Step:
    """The pause has lasted too long."""
    waited = f"no capacity came within {order.elastic.wait_s:g} s (elastic.wait_s)"
    return end_waiting(state, f"{state.reason}; {waited}")


def end_waiting(state: Waiting, reason: str) -> Step:
    """End a job that waits, once what its ranks hold is written.

    Args:
        reason: empty where a stop was asked for.
    """
    saving = Saving(state.roster, state.step, reason)
    return saved(saving) if state.saving is None else (saving, ())


def saved(state: Saving) -> Step:
    """What could be written is."""
    newest = state.roster.checkpoints[0].step if state.roster.checkpoints else 0
    reason = state.reason or "stopped while the job waited for capacity"
    if newest < state.step:
        lost = counted(state.step - newest, "committed step")
        way_out = (
            f"--resume goes on from the checkpoint of step {newest}" if newest else "there is no checkpoint"
        )
        return close(Failed(f"{reason}; {lost} could not be written: {way_out}", user_error=False))
    if not state.reason:
        return close(Finished(state.step, stopped=True, state_sha256=None))
    stays = f"The checkpoint of step {newest} stays: --resume goes on from it"
    return close(Failed(f"{reason}. {stays}", user_error=False))


def _save(roster: Roster, rescue: Rescue) -> Save:
    return Save(rescue, roster.plan, roster.generation + 1)


def close(end: Finished | Failed) -> Step:
    """Give everything back, then end so."""
    return Closing(end), (Release(),)


def verdict(loss: RankLost) -> Failed:
    """The job ends by `loss`."""
    return Failed(f"rank {loss.rank}: {loss.error}", loss.user_error)


def log_loss(loss: RankLost) -> Log:
    """`loss` for the event log."""
    return Log(events.RankFailed(rank=loss.rank, error=loss.error, details=loss.details))


def without(roster: Roster, rank: int) -> Roster:
    """`roster` without a rank that is gone; its place is told from `members` until the next generation."""
    one = {rank}
    return replace(roster, alive=roster.alive - one, starting=roster.starting - one, going=roster.going - one)


def _words(troubles: tuple[RankLost, ...]) -> str:
    """The cause among what was heard: who died, then who raised, then who was only cut off."""
    if not troubles:
        return ""
    cause = min(troubles, key=lambda loss: (not loss.dead, loss.cut_off))
    others = [loss.rank for loss in troubles if loss.dead and loss.rank != cause.rank]
    more = f" (and {', '.join(f'rank {rank}' for rank in others)})" if others else ""
    return f"rank {cause.rank}: {cause.error}{more}"
