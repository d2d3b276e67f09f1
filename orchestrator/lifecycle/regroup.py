"""From the end of one generation to the next one's training: assess, decide, finish the commit, plan, follow, host,
join, train.

A failure at any point restarts this part of the lifecycle. Pure, like `machine.py`, whose table leads here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.events import types as events
from orchestrator.history.freeze_history import still_proposed
from orchestrator.lifecycle import moves, planned_change, scaling
from orchestrator.lifecycle.effects import (
    AppendToLog,
    Assess,
    Dismiss,
    Effect,
    FinishCommit,
    Follow,
    HostStore,
    Join,
    LogRegroup,
    MakePlan,
    Step,
)
from orchestrator.lifecycle.ending import close, hold, log_loss, log_shortage, save
from orchestrator.lifecycle.in_training import train, without
from orchestrator.lifecycle.migration import same
from orchestrator.lifecycle.recovery import (
    Abort,
    PauseDecided,
    RecoveryPlan,
    Rescue,
    Situation,
    decide,
    rescue,
)
from orchestrator.lifecycle.reports import with_freeze
from orchestrator.lifecycle.states import (
    Assessed,
    Assessing,
    Closing,
    Draft,
    FinishingCommit,
    Hosting,
    JobData,
    JobFailed,
    Joining,
    Loading,
    Order,
    Planning,
    Saving,
    Stopping,
    Training,
    Waiting,
)
from orchestrator.lifecycle.stimuli import (
    CommitFinished,
    Joined,
    PlanReady,
    Positioned,
    RankLoaded,
    RankLost,
    StoreUp,
    Unplannable,
)
from planner.failure_domains import lacking
from planner.plan import Plan
from planner.rank_program import place_programs
from planner.schedule.expand import pipeline_schedules
from planner.shards import Piece
from planner.wording import counted, named_or_counted
from workers.protocol.errors import DamagedCheckpoint
from workers.protocol.orders import Assignment, Generation, StatePart, StateSource
from workers.protocol.reports import FreezeStarted

LARGER = (
    "What would help: pipeline.recompute = true, a smaller pipeline.microbatch_size, more ranks (pipeline.ranks) or"
    " devices with more memory"
)


def assess(
    order: Order,
    job: JobData,
    troubles: tuple[RankLost, ...],
    failed: tuple[Plan, tuple[int, ...]] | None = None,
) -> Step[Assessed]:
    """The generation, or the attempt to form the next, is over: ask all living ranks for positions.

    Args:
        failed: the plan of the attempt and its ranks by place; None: those of the generation.
    """
    for loss in troubles:
        if loss.dead:
            job = without(job, loss.rank)
    asked = None if troubles else job.intents.asked
    job, void = moves.ended(
        replace(
            job,
            progress=replace(job.progress, round=job.progress.round + 1),
            intents=replace(
                job.intents, asked=asked, pausing=False, change=None if troubles else job.intents.change
            ),
        )
    )
    logs: list[Effect] = []
    for loss in troubles:
        logs += () if loss.cut_off else (log_loss(loss),)
        logs += log_shortage(job, *(failed or (job.progress.plan, job.membership.members)), loss)
    logs += void
    after, effects = _decided(order, Assessing(job, job.membership.alive, (), troubles))
    return after, (
        *logs,
        Assess(job.membership.alive, job.progress.round, job.progress.generation),
        *effects,
    )


def positioned(order: Order, state: Assessing, stimulus: Positioned) -> Step[Assessed]:
    """One more rank has reported its position."""
    waiting = state.waiting - {stimulus.position.rank}
    return _decided(order, replace(state, waiting=waiting, positions=(*state.positions, stimulus.position)))


def assess_without(order: Order, state: Assessing, loss: RankLost) -> Step[Assessed]:
    """One more rank is dead, or reports why its training failed."""
    logs: tuple[Effect, ...] = () if loss.cut_off else (log_loss(loss),)
    logs += log_shortage(state.job, state.job.progress.plan, state.job.membership.members, loss)
    spares = state.job.membership.idle - state.job.membership.tried if loss.dead else frozenset[int]()
    aside = loss.rank in state.job.membership.starting | spares
    if aside or loss.dead:
        state = replace(state, job=without(state.job, loss.rank), waiting=state.waiting - {loss.rank})
        left = tuple(position for position in state.positions if position.rank != loss.rank)
        state = replace(state, positions=left)
    if aside:
        logs = (*logs, Dismiss(frozenset({loss.rank})))
    else:
        job = replace(state.job, intents=replace(state.job.intents, asked=None))
        state = replace(state, job=job, troubles=(*state.troubles, loss))
    after, effects = _decided(order, state)
    return after, (*logs, *effects)


def _decided(order: Order, state: Assessing) -> Step[Assessed]:
    """Decide once all ranks have reported their positions."""
    if state.waiting:
        return state, ()
    job = state.job
    decision = decide(
        Situation(
            plan=job.progress.plan,
            members=job.membership.members,
            positions={position.rank: position for position in state.positions},
            tried=job.membership.tried,
            going=job.membership.going,
            step=job.progress.step,
            checkpoints=job.progress.checkpoints,
            wanted=scaling.size_of(order, job).places,
            elastic=order.elastic,
            lineup=planned_change.lineup(job),
            asked=job.intents.asked,
            trouble=_words(state.troubles),
            short=any(loss.shortage is not None for loss in state.troubles),
            failures=job.progress.failures,
            failed_at=job.progress.failed_at,
            trained=job.progress.trained,
            interrupted=job.progress.interrupted,
            packs=order.packs,
        )
    )
    match decision:
        case Abort(reason=reason, rescue=Rescue() as rescued):
            return Saving(job, rescued.step, reason), (save(job, rescued),)
        case Abort(reason=reason):
            return close(JobFailed(reason, user_error=False))
        case PauseDecided():
            if came := _unasked(state):
                asking = Assess(came, job.progress.round, job.progress.generation)
                return replace(state, waiting=came), (asking,)
            failed = replace(
                job,
                progress=replace(
                    job.progress,
                    failures=decision.failures,
                    failed_at=max(job.progress.failed_at, decision.step),
                ),
                intents=replace(job.intents, change=None),
            )
            return hold(order, failed, decision)
        case RecoveryPlan() as recovery_plan:
            pass
    taken_up = [plan for position in state.positions for plan in position.freeze_plans]
    freeze = with_freeze(job.progress.freeze, taken_up)
    logs = [AppendToLog(FreezeStarted(plan=plan)) for plan in freeze if plan not in job.progress.freeze]
    proposed = job.intents.proposed
    for started in freeze:
        proposed = still_proposed(proposed, started)
    job = replace(
        job,
        progress=replace(
            job.progress,
            failures=recovery_plan.failures,
            failed_at=max(job.progress.failed_at, recovery_plan.reached),
            freeze=freeze,
        ),
        intents=replace(job.intents, proposed=proposed),
    )
    if recovery_plan.commit_outcome is None or not recovery_plan.finishing:
        after, effects = plan(order, job, recovery_plan)
        return after, (*logs, *effects)
    finish = FinishCommit(
        recovery_plan.finishing, recovery_plan.commit_outcome, job.progress.round, recovery_plan.handover
    )
    return FinishingCommit(job, recovery_plan, recovery_plan.finishing), (*logs, finish)


def _unasked(state: Assessing) -> frozenset[int]:
    """Ranks that came up while positions were asked for: with them there may be enough."""
    members = state.job.membership
    return members.alive - members.going - {position.rank for position in state.positions}


def commit_finished(
    order: Order, state: FinishingCommit, stimulus: CommitFinished
) -> Step[FinishingCommit | Planning | Loading]:
    """One more rank stands at the common step."""
    waiting = state.waiting - {stimulus.rank}
    if waiting:
        return replace(state, waiting=waiting), ()
    return plan(order, state.job, state.recovery_plan)


def plan(order: Order, job: JobData, recovery_plan: RecoveryPlan) -> Step[Planning | Loading]:
    """Determine the next plan: that of the move, the same as before, or a new one from the planner."""
    if (moved := moves.instead(order, job, recovery_plan)) is not None:
        job, plan, schedule = moved
        loading, effects = _load(job, Draft(recovery_plan, plan, schedule))
        return loading, (AppendToLog(events.Issued(plan=plan)), *effects)
    if (ahead := planned_change.instead(order, job, recovery_plan)) is not None:
        job, plan, schedule = ahead
        draft = Draft(recovery_plan, plan, schedule)
        few = lacking([job.membership.domain(rank) for rank in draft.members], order.elastic.peer_copies)
        loading, effects = _load(job, draft)
        return loading, (AppendToLog(events.Issued(plan=plan)), *_few_domains(few), *effects)
    job, void = moves.voided(job, "other ranks regrouped than those it was for")
    after, effects = _plan(order, job, recovery_plan)
    return after, (*void, *effects)


def _plan(order: Order, job: JobData, recovery_plan: RecoveryPlan) -> Step[Planning | Loading]:
    """The same plan as before, or a new one from the planner."""
    if recovery_plan.keep_plan:
        # Copies for a change of ranks, or for a move, that did not come go.
        plan, issue = job.intents.ahead.before or job.progress.plan, ()
        if plan.key != (order.epoch, job.progress.version):
            job = replace(job, progress=replace(job.progress, version=job.progress.version + 1))
            plan = replace(plan, epoch=order.epoch, version=job.progress.version, reason=recovery_plan.reason)
            issue = (AppendToLog(events.Issued(plan=plan)),)
        loading, effects = _load(job, Draft(recovery_plan, plan, job.progress.schedule))
        return loading, (*issue, *effects)
    make = MakePlan(
        recovery_plan=recovery_plan,
        first=order.plan if recovery_plan.cause == "start" else None,
        domains={rank: job.membership.domain(rank) for rank in recovery_plan.lineup},
        epoch=order.epoch,
        version=job.progress.version + 1,
        round=job.progress.round,
    )
    return Planning(job, recovery_plan), (make,)


def planned(order: Order, state: Planning, stimulus: PlanReady) -> Step[Loading | Waiting | Saving | Closing]:
    """The planner has made a plan: log it, then send it. A first plan needs domains for all copies."""
    if state.recovery_plan.cause == "memory" and same(stimulus.plan, state.job.progress.plan):
        return unplannable(order, state, Unplannable(f"no smaller plan is known. {LARGER}"))
    job = replace(state.job, progress=replace(state.job.progress, version=stimulus.plan.version))
    draft, begins = (
        Draft(state.recovery_plan, stimulus.plan, stimulus.schedule),
        state.recovery_plan.cause == "start",
    )
    few = lacking([job.membership.domain(rank) for rank in draft.members], order.elastic.peer_copies)
    if few is not None and begins:
        ways_out = "add nodes, spread the ranks over more of them, or lower elastic.copies"
        return close(JobFailed(f"{few}: {ways_out}", user_error=True))
    warning = _few_domains(few)
    if begins and order.elastic.peer_copies == 1 and order.elastic.copies_in != "host":
        warning += _costly_copies(stimulus.plan)
    loading, effects = _load(job, draft)
    alternatives = order.alternatives if begins else ()
    return loading, (
        AppendToLog(events.Issued(plan=stimulus.plan, alternatives=alternatives)),
        *warning,
        *effects,
    )


def _few_domains(few: str | None) -> tuple[Effect, ...]:
    """Warn of `few` failure domains."""
    if few is None:
        return ()
    return (AppendToLog(events.Warned(text=f"{few}: each layer has as many copies as these allow")),)


def _costly_copies(plan: Plan) -> tuple[Effect, ...]:
    """Warn where copies of shards take more memory than shards save."""
    if plan.shards != 2 or not plan.standbys:
        return ()
    text = (
        f'pipeline.shard = "{plan.shard}" saves no memory here: between 2 replicas, copies of shards take more than'
        " shards save, while whole replicas are copies of each other; but in host memory, where GPU jobs keep them,"
        ' they take none of the device\'s. Use more replicas, elastic.copies_in = "host", elastic.redundancy ='
        ' "checkpoint", or leave shard out'
    )
    return (AppendToLog(events.Warned(text=text)),)


def unplannable(order: Order, state: Planning, stimulus: Unplannable) -> Step[Waiting | Saving | Closing]:
    """No plan fits the ranks that are left: wait for more, if that is allowed."""
    if state.recovery_plan.cause == "start":
        return close(JobFailed(stimulus.reason, user_error=True))
    recovery_plan = state.recovery_plan
    complete = len(recovery_plan.lineup) >= scaling.size_of(order, state.job).places
    short = recovery_plan.cause == "memory" and complete
    if order.elastic.wait_s == 0 and not short:
        return close(
            JobFailed(f"{stimulus.reason}; elastic.wait_s = 0 waits for no others", user_error=False)
        )
    newest = state.job.progress.checkpoints[0].step if state.job.progress.checkpoints else 0
    rescued = None
    if (
        recovery_plan.commit_outcome is not None
        and recovery_plan.sources
        and all(source.part is StatePart.ALL for source in recovery_plan.sources)
        and recovery_plan.step > newest
    ):
        rescued = rescue(
            recovery_plan.step, recovery_plan.finishing, recovery_plan.commit_outcome, recovery_plan.sources
        )
    if short:
        # The job has all the ranks that it may have: waiting brings no memory.
        reason = f"{recovery_plan.reason}: {stimulus.reason}"
        if rescued is None:
            return close(JobFailed(reason, user_error=False))
        return Saving(state.job, rescued.step, reason), (save(state.job, rescued),)
    holding = PauseDecided(
        reason=stimulus.reason, step=recovery_plan.step, rescue=rescued, interrupted=bool(recovery_plan.rerun)
    )
    return hold(order, state.job, holding)


def _load(job: JobData, draft: Draft) -> Step[Loading]:
    recovery_plan, before = draft.recovery_plan, job.membership.members
    job = replace(
        job, membership=replace(job.membership, tried=job.membership.tried | frozenset(draft.members))
    )
    start = recovery_plan.checkpoints[0] if recovery_plan.checkpoints else None
    programs = place_programs(draft.plan, pipeline_schedules(draft.plan, draft.schedule))
    sources: dict[int, tuple[StateSource, ...]] = {}
    for source in recovery_plan.sources:
        sources[source.layer] = (*sources.get(source.layer, ()), source)
    salvaged = tuple(source for source in recovery_plan.sources if source.part is StatePart.WEIGHTS)

    def needed(place: int) -> tuple[StateSource, ...]:
        own: list[StateSource] = []
        for piece in draft.plan.pieces_of_place(place):
            found = sources.get(piece.layer, ())
            # Of a layer that was cut otherwise, the rank needs all shards.
            own += [source for source in found if source.piece == piece] or found
        return tuple(dict.fromkeys((*own, *salvaged)))

    assignments = {
        rank: Assignment(
            place=place,
            plan=draft.plan,
            program=programs[place],
            step=recovery_plan.step,
            start=start,
            sources=needed(place),
            moments=recovery_plan.moments[0] if recovery_plan.moments else None,
            freeze=job.progress.freeze,
            carried=recovery_plan.carried,
            fresh=rank not in before,
        )
        for place, rank in enumerate(draft.members)
    }
    return Loading(job, draft, frozenset(draft.members)), (Follow(assignments, job.progress.round),)


def loaded(
    order: Order, state: Loading, stimulus: RankLoaded
) -> Step[Loading | Planning | Hosting | Closing]:
    """One more rank has its layers, or found the checkpoint damaged: then all try the one before."""
    damage, logs = state.damage, ()
    if (
        stimulus.damage is not None and stimulus.damage not in damage
    ):  # its owner and its standbys all read it
        damage = (*damage, stimulus.damage)
        logs = (AppendToLog(events.Skipped(rank=stimulus.rank, damage=stimulus.damage)),)
    waiting = state.waiting - {stimulus.rank}
    if waiting:
        return replace(state, waiting=waiting, damage=damage), logs
    if not damage:
        host = HostStore(state.draft.members[0], state.job.progress.round)
        return Hosting(state.job, state.draft), (*logs, host)
    recovery_plan = state.draft.recovery_plan
    if recovery_plan.moments:
        return _with_older_moments(state, damage[0], logs)
    damaged, *older = recovery_plan.checkpoints
    if older:
        known = tuple(ref for ref in state.job.progress.checkpoints if ref != damaged)
        instead = f"{damage[0].file} in {damage[0].path} {damage[0].problem}: back to the checkpoint of step"
        cost = max(0, recovery_plan.reached - older[0].step)
        recovery_plan = replace(
            recovery_plan,
            checkpoints=tuple(older),
            step=older[0].step,
            reason=f"{recovery_plan.reason}; {instead} {older[0].step}, which costs {counted(cost, 'committed step')}",
        )
        job = replace(state.job, progress=replace(state.job.progress, checkpoints=known))
        if order.packs and not recovery_plan.keep_plan and recovery_plan.cause != "start":
            # Fewer layers may be frozen in that step.
            after, effects = plan(order, job, recovery_plan)
            return after, (*logs, *effects)
        loading, effects = _load(job, replace(state.draft, recovery_plan=recovery_plan))
        return loading, (*logs, *effects)
    worst = damage[0]
    closing, effects = close(
        JobFailed(
            f"no checkpoint is whole: {worst.file} in {worst.path}: {worst.problem}, and there is none before"
            " it. Restore the file, or start again in another job.output",
            user_error=True,
        )
    )
    return closing, (*logs, *effects)


def _planned_for(job: JobData, recovery_plan: RecoveryPlan) -> int:
    """The first step of the frozen prefix that the plan of a generation counts on."""
    change = job.intents.change
    if recovery_plan.keep_plan or recovery_plan.cause == "start":
        return job.progress.packed_for
    if change is not None and change.plan is not None and change.cause == recovery_plan.cause:
        return change.prefix
    return min(job.progress.prefix_told, recovery_plan.step + 1)


def _with_older_moments(state: Loading, damage: DamagedCheckpoint, logs: tuple[Effect, ...]) -> Step[Loading]:
    """The weights are at hand: only the moments come from an older checkpoint, or start from zero."""
    recovery_plan, (damaged, *older) = state.draft.recovery_plan, state.draft.recovery_plan.moments
    known = tuple(ref for ref in state.job.progress.checkpoints if ref != damaged)
    instead = f"the moments of the checkpoint of step {older[0].step}" if older else "fresh moments"
    why = f"{damage.file} in {damage.path} {damage.problem}: {instead} in their place"
    recovery_plan = replace(recovery_plan, moments=tuple(older), reason=f"{recovery_plan.reason}; {why}")
    job = replace(state.job, progress=replace(state.job.progress, checkpoints=known))
    loading, effects = _load(job, replace(state.draft, recovery_plan=recovery_plan))
    return loading, (*logs, *effects)


def store_up(order: Order, state: Hosting, stimulus: StoreUp) -> Step[Joining]:
    """The store is open: log the generation, then let it form."""
    recovery_plan = state.draft.recovery_plan
    before, number = state.job, state.job.progress.generation + 1
    # If no rank holds the layers, later reports of earlier steps no longer count.
    since = before.progress.since if recovery_plan.goes_on or recovery_plan.cause == "start" else number
    job = replace(before, progress=replace(before.progress, generation=number, since=since))
    generation = Generation(
        number=job.progress.generation,
        epoch=order.epoch,
        members=state.draft.members,
        store_host=stimulus.host,
        store_port=stimulus.port,
        timeout_s=order.timeout_s,
    )
    start = recovery_plan.checkpoints[0] if recovery_plan.checkpoints else None
    formed = events.Formed(
        generation=generation,
        start=start,
        step=recovery_plan.step,
        snapshot=recovery_plan.goes_back,
        failures=job.progress.failures,
        failed_at=job.progress.failed_at,
    )
    logs = [AppendToLog(formed)]
    if recovery_plan.cause == "start":
        # Decided in an earlier run, for commits still to come here: no rank will report it.
        coming = [plan for plan in order.freezing.plans if (plan.start or 0) > recovery_plan.step + 1]
        logs += [AppendToLog(FreezeStarted(plan=plan)) for plan in coming]
    joining = Joining(job, state.draft, generation, frozenset(state.draft.members))
    return joining, (*logs, Join(generation, job.progress.round))


def joined(order: Order, state: Joining, stimulus: Joined) -> Step[Joining | Training | Stopping]:
    """One more rank is in the process group."""
    waiting = state.waiting - {stimulus.rank}
    if waiting:
        return replace(state, waiting=waiting), ()
    draft, recovery_plan = state.draft, state.draft.recovery_plan
    before = state.job
    job = replace(
        before,
        membership=replace(before.membership, members=draft.members, tried=frozenset()),
        progress=replace(
            before.progress,
            plan=draft.plan,
            schedule=draft.schedule,
            trained=True,
            step=min(before.progress.step, recovery_plan.step),
            early=before.progress.early if recovery_plan.goes_on else (),
            began=recovery_plan.step,
            validated=min(before.progress.validated, recovery_plan.step),
            prefix_told=min(before.progress.prefix_told, recovery_plan.step + 1),
            packed_for=_planned_for(before, recovery_plan),
            paused=False,
            out_of_patience=False,
            interrupted=False,
        ),
        intents=replace(before.intents, asked=None),
    )
    job = planned_change.formed(job, draft.members)
    size = scaling.size_of(order, job)
    released = {*scaling.excess(job, size)} | job.membership.going
    job, scaled = scaling.answered(job, size, last=recovery_plan.cause == "scale")
    training, effects = train(order, job, step=recovery_plan.step)
    if recovery_plan.cause == "start":
        return training, (*effects, *scaled)
    regrouped = events.Regrouped(
        generation=state.generation.number,
        cause="capacity"
        if before.progress.paused and recovery_plan.cause != "resume"
        else recovery_plan.cause,
        reason=recovery_plan.reason,
        # A member that has no place any more may stay as a spare.
        lost=tuple(
            rank
            for rank in before.membership.members
            if rank not in draft.members and (rank in released or rank not in job.membership.alive)
        ),
        joined=tuple(rank for rank in draft.members if rank not in before.membership.members),
        step=recovery_plan.step,
        rerun=recovery_plan.rerun,
        steps_lost=max(0, recovery_plan.reached - recovery_plan.step),
        fetched=_fetched(draft, planned_change.at_hand(before, draft)),
        detect_s=0.0,
        settle_s=0.0,
        plan_s=0.0,
        move_s=0.0,
        resume_s=0.0,
    )
    return training, (effects[0], *scaled, LogRegroup(regrouped), *effects[1:])


def _fetched(draft: Draft, ahead: Mapping[int, tuple[Piece, ...]]) -> int | None:
    """Number of layers, or shards, that ranks lacked, each counted once per rank. None: they came from a checkpoint.

    Args:
        ahead: rank -> layers, or shards, that it has copied without being a member.
    """
    recovery_plan, plan = draft.recovery_plan, draft.plan
    if not recovery_plan.sources:
        return None
    sources = {source.piece for source in recovery_plan.sources}

    def lacks(piece: Piece, has: set[Piece]) -> bool:
        # Of a layer that was cut otherwise, the rank needs all shards.
        made_of = [piece] if piece in sources else [each for each in sources if each.layer == piece.layer]
        return piece not in has and not has.issuperset(made_of)

    return sum(
        lacks(piece, {*recovery_plan.held.get(rank, ()), *ahead.get(rank, ())})
        for place, rank in enumerate(draft.members)
        for piece in plan.pieces_of_place(place)
    )


def _words(troubles: tuple[RankLost, ...]) -> str:
    """Describe the cause: a rank that died, else one that raised, else one that was only cut off."""
    if not troubles:
        return ""
    cause = min(troubles, key=lambda loss: (not loss.dead, loss.cut_off))
    others = [loss.rank for loss in troubles if loss.dead and loss.rank != cause.rank]
    more = f" (and {named_or_counted('rank', others)})" if others else ""
    return f"rank {cause.rank}: {cause.error}{more}"
