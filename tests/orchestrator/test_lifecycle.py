"""The life of a job, driven by hand: no cluster, no clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from orchestrator import events
from orchestrator.lifecycle import InvalidTransition, handle
from orchestrator.states import (
    Aborted,
    Ask,
    Asked,
    Closing,
    Command,
    Ended,
    Failed,
    Failing,
    Finished,
    GraceOver,
    HostStore,
    Join,
    Joined,
    Joining,
    Leave,
    Load,
    Loaded,
    Log,
    Order,
    Pending,
    Place,
    Placed,
    Prepare,
    RankLost,
    Ready,
    Release,
    Released,
    Reported,
    Start,
    State,
    Stimulus,
    Stopping,
    StoreUp,
    Train,
    Training,
    Unplaceable,
    Wait,
)
from planner.plan import Plan
from workers.digest import state_digest
from workers.protocol import (
    CheckpointRef,
    CheckpointReport,
    DamagedCheckpoint,
    Outcome,
    Request,
    StepReport,
)

PLAN = Plan(
    epoch=1,
    version=1,
    reason="first",
    layers=((0, 1), (1, 3)),
    stage_ranks=(0, 1),
    schedule="1f1b",
    chunks=1,
    microbatches=2,
    replicas=1,
)
ORDER = Order(job="j", epoch=1, generation=3, plan=PLAN, checkpoints=(), timeout_s=30.0)
OLD, NEW = CheckpointRef(path="/out/4", step=4), CheckpointRef(path="/out/8", step=8)
RESUMED = Order(job="j", epoch=1, generation=3, plan=PLAN, checkpoints=(NEW, OLD), timeout_s=30.0)
DAMAGE = DamagedCheckpoint(path="/out/8", file="head.safetensors", problem="its checksum differs")


def step_report(step: int) -> StepReport:
    return StepReport(
        generation=1,
        step=step,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        samples=2,
        tokens=0,
        step_s=0.1,
        bubble=0.1,
        skipped=False,
    )


def outcome(rank: int, **changes: object) -> Outcome:
    layers = {0: ((0, "a"),), 1: ((1, "b"), (2, "c"))}[rank]
    fields = {"rank": rank, "step": 9, "stopped": False, "layer_digests": layers, **changes}
    return Outcome(**fields)  # pyright: ignore[reportArgumentType]


class Job:
    """A job and everything it ever asked for."""

    def __init__(self, order: Order = ORDER) -> None:
        self.order = order
        self.state: State = Pending()
        self.commands: list[Command] = []

    def take(self, *stimuli: Stimulus) -> Job:
        for stimulus in stimuli:
            self.state, commands = handle(self.order, self.state, stimulus)
            self.commands.extend(commands)
        return self

    @property
    def effects(self) -> list[Command]:
        return [command for command in self.commands if not isinstance(command, Log)]

    @property
    def logged(self) -> list[events.Event]:
        return [command.event for command in self.commands if isinstance(command, Log)]


def ready(rank: int) -> Ready:
    return Ready(rank, f"node{rank}", f"10.0.0.{rank}", 100 + rank)


TO_PREPARED = (Start(), Placed(), ready(0), ready(1))
TO_TRAINING = (*TO_PREPARED, Loaded(0, None), Loaded(1, None), StoreUp("h", 7), Joined(1), Joined(0))


def test_a_whole_life() -> None:
    job = Job().take(*TO_TRAINING)
    assert job.state == Training(0, frozenset({0, 1}), ())
    job.take(Reported(step_report(1)), Reported(step_report(2)))
    assert job.state == Training(2, frozenset({0, 1}), ())
    job.take(Ended(outcome(1)), Ended(outcome(0)))
    assert isinstance(job.state, Closing)
    job.take(Released())
    assert job.state == Finished(9, stopped=False, state_sha256=state_digest(["a", "b", "c"]))
    kinds = [type(effect) for effect in job.effects]
    assert kinds == [Place, Prepare, Load, HostStore, Join, Train, Release]
    assert [type(event) for event in job.logged] == [
        events.Issued,
        events.RankStarted,
        events.RankStarted,
        events.Formed,
        StepReport,
        StepReport,
        events.RankEnded,
        events.RankEnded,
        events.Finished,
    ]


def test_what_is_sent_is_logged_before() -> None:
    job = Job().take(*TO_TRAINING)
    generation = next(command.generation for command in job.commands if isinstance(command, Join))
    assert (generation.number, generation.epoch) == (3, 1)
    assert generation.members == (0, 1)
    assert (generation.store_host, generation.store_port, generation.timeout_s) == ("h", 7, 30.0)
    formed = Log(events.Formed(generation=generation, start=None))
    assert job.commands.index(formed) < job.commands.index(Join(generation))
    assert job.commands.index(Log(events.Issued(plan=PLAN))) < job.commands.index(Place())


def test_a_stop_reaches_the_ranks_once_and_ends_the_job() -> None:
    job = Job().take(*TO_TRAINING, Asked(Request.CHECKPOINT))
    assert isinstance(job.state, Training)
    job.take(Asked(Request.STOP), Asked(Request.STOP), Reported(step_report(3)))
    assert job.state == Stopping(3, frozenset({0, 1}), ())
    job.take(Ended(outcome(0, stopped=True, step=3)), Ended(outcome(1, stopped=True, step=3)), Released())
    assert job.state == Finished(3, stopped=True, state_sha256=state_digest(["a", "b", "c"]))
    assert [effect for effect in job.effects if isinstance(effect, Ask)] == [
        Ask(Request.CHECKPOINT),
        Ask(Request.STOP),
    ]


@pytest.mark.parametrize("length", range(len(TO_TRAINING)))
def test_a_stop_before_training_needs_no_rank(length: int) -> None:
    job = Job(RESUMED).take(*TO_TRAINING[:length], Asked(Request.STOP), Released())
    assert job.state == Finished(8, stopped=True, state_sha256=None)
    assert job.effects[-1] == Release()


@pytest.mark.parametrize("length", range(len(TO_TRAINING) + 1))
def test_an_abort_releases_at_once(length: int) -> None:
    job = Job().take(*TO_TRAINING[:length], Aborted())
    assert isinstance(job.state, Closing)
    assert job.effects[-1] == Release()
    job.take(Released())
    assert isinstance(job.state, Failed)


def test_what_the_cluster_lacks_ends_the_job() -> None:
    job = Job().take(Start(), Unplaceable("4 GPU missing"), Released())
    assert job.state == Failed("4 GPU missing", user_error=True)


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used() -> None:
    job = Job(RESUMED).take(*TO_PREPARED, Loaded(1, DAMAGE), Loaded(0, None))
    assert events.Skipped(rank=1, damage=DAMAGE) in job.logged
    assert [effect for effect in job.effects if isinstance(effect, Load)] == [Load(NEW), Load(OLD)]
    job.take(Loaded(0, None), Loaded(1, None), StoreUp("h", 7), Joined(0), Joined(1))
    assert job.state == Training(4, frozenset({0, 1}), ())
    assert any(isinstance(event, events.Formed) and event.start == OLD for event in job.logged)


def test_no_whole_checkpoint_is_the_users_to_mend() -> None:
    job = Job(RESUMED).take(*TO_PREPARED)
    for damage in (DAMAGE, DamagedCheckpoint(path="/out/4", file="manifest.json", problem="is cut short")):
        job.take(Loaded(0, None), Loaded(1, damage))
    job.take(Released())
    assert isinstance(job.state, Failed)
    assert job.state.user_error
    assert "manifest.json in /out/4: is cut short" in job.state.reason


THREE = Order(
    job="j",
    epoch=1,
    generation=1,
    plan=Plan(
        epoch=1,
        version=1,
        reason="first",
        layers=((0, 1), (1, 2), (2, 3)),
        stage_ranks=(0, 1, 2),
        schedule="1f1b",
        chunks=1,
        microbatches=2,
        replicas=1,
    ),
    checkpoints=(),
    timeout_s=1.0,
)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_cause_is_named_whoever_is_heard_first(order: tuple[int, ...]) -> None:
    losses = [
        RankLost(0, "connection reset", cut_off=True),
        RankLost(1, "was killed by signal 9"),
        RankLost(2, "connection closed", cut_off=True),
    ]
    job = Job(THREE)
    job.state = Training(5, frozenset({0, 1, 2}), ())
    job.take(losses[order[0]])
    if order[0] != 1:
        assert job.effects == [Leave(frozenset({0, 1, 2}) - {order[0]}), Wait(5.0)]
    job.take(*(losses[index] for index in order[1:]))
    assert job.state == Closing(Failed("rank 1: was killed by signal 9", user_error=False))
    assert job.effects[-1] == Release()


def test_where_all_were_cut_off_the_first_is_named() -> None:
    job = Job(THREE)
    job.state = Training(5, frozenset({0, 1, 2}), ())
    job.take(*(RankLost(rank, f"timed out {rank}", cut_off=True) for rank in (1, 0, 2)))
    assert job.state == Closing(Failed("rank 1: timed out 1", user_error=False))
    assert len([event for event in job.logged if isinstance(event, events.RankFailed)]) == 3


def test_ranks_that_stay_silent_are_not_waited_for() -> None:
    job = Job().take(*TO_TRAINING, RankLost(0, "connection reset", cut_off=True))
    assert isinstance(job.state, Failing)
    job.take(GraceOver(), Released())
    assert job.state == Failed("rank 0: connection reset", user_error=False)


def test_a_rank_that_ended_is_not_told_to_leave() -> None:
    job = Job().take(*TO_TRAINING, Ended(outcome(0)), RankLost(1, "raised"))
    assert job.state == Closing(Failed("rank 1: raised", user_error=False))


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
def test_a_failure_before_the_ranks_are_joined_ends_the_job_at_once(length: int) -> None:
    job = Job().take(*TO_TRAINING[:length], RankLost(1, "no such file", user_error=True))
    assert job.state == Closing(Failed("rank 1: no such file", user_error=True))


def test_a_failure_while_joining_makes_the_others_leave() -> None:
    job = Job().take(*TO_TRAINING[:7])
    assert isinstance(job.state, Joining)
    job.take(RankLost(1, "refused", cut_off=True))
    assert Leave(frozenset({0})) in job.effects
    job.take(Joined(0), Released())
    assert job.state == Failed("rank 1: refused", user_error=False)


def test_an_unwritten_last_checkpoint_is_a_failure() -> None:
    job = Job().take(*TO_TRAINING, Ended(outcome(0)), Ended(outcome(1, checkpoint_error="disk full")))
    assert isinstance(job.state, Closing)
    assert isinstance(job.state.end, Failed)
    assert "trained to step 9" in job.state.end.reason
    assert "disk full" in job.state.end.reason


def test_siblings_that_differ_are_a_failure() -> None:
    twin = outcome(1, layer_digests=((0, "other"),))
    job = Job().take(*TO_TRAINING, Ended(outcome(0)), Ended(twin))
    assert isinstance(job.state, Closing)
    assert isinstance(job.state.end, Failed)
    assert "layer 0" in job.state.end.reason


def test_late_reports_are_kept() -> None:
    report = CheckpointReport(step=9, path="/out/9", bytes=1, seconds=0.1)
    job = Job().take(*TO_TRAINING, Ended(outcome(0)), Ended(outcome(1)))
    job.take(Reported(report), Released(), Reported(report))
    assert job.logged.count(report) == 2
    assert isinstance(job.state, Finished)


@pytest.mark.parametrize(
    ("before", "stimulus"),
    [
        ((), Placed()),
        ((Start(),), Start()),
        ((Start(),), ready(0)),
        ((Start(), Placed()), Joined(0)),
        (TO_TRAINING, Placed()),
        (TO_TRAINING, GraceOver()),
        (TO_TRAINING, Released()),
        (TO_PREPARED, Ended(outcome(0))),
    ],
)
def test_a_pair_that_means_nothing_raises_with_the_story(
    before: Iterable[Stimulus], stimulus: Stimulus
) -> None:
    job = Job().take(*before)
    with pytest.raises(InvalidTransition) as caught:
        handle(job.order, job.state, stimulus, tuple(before))
    assert caught.value.history == tuple(before)
    assert repr(stimulus) in str(caught.value)
    assert all(repr(past) in str(caught.value) for past in before)
