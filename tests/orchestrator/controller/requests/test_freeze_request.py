"""What a request to change freezing gives the ranks: pure decisions from the job's view."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from lifecycle_jobs import plan_of as even_plan
from lifecycle_jobs import step_report
from made_profile import made_profile

from orchestrator.controller.requests.freeze_request import (
    Adopt,
    Running,
    Solve,
    WantedFreezing,
    decided,
    described,
    plan_of,
    question_for_new_times,
)
from orchestrator.controller.requests.freezing_in_force import method_to_plan_for, open_question
from orchestrator.events import types as events
from orchestrator.history.job_view import JobView, fold
from planner.freezing import AUTO, Budget, FreezeOverrides, FreezePlan, Phases
from planner.profile import Profile
from planner.schedule.expand import schedule_of
from planner.search.replan import Replanner
from workers.config import FreezeConfig
from workers.protocol.errors import JobError
from workers.protocol.reports import ActionSpan, FreezeStarted, PrefixFrozen, TimelineReport

PHASES = Phases(warm_up=2, monitoring=6, ramp=8)
TIMELY = FreezeConfig(method="timelyfreeze", r_max=0.8, warm_up=2, monitoring=6, ramp=8)
NONE = FreezeConfig()
PLAN = even_plan(2, layers=2)
SCHEDULE = schedule_of(PLAN)
SOLVED = FreezePlan(epoch=1, version=1, ratios=((0.5, 0.5), (1.0, 1.0)), start=9)


def timelines(first: int, middle: int, last: int) -> list[TimelineReport]:
    """B takes 2 s up to the step `middle`, then 1 s, as F always does."""
    reports: list[TimelineReport] = []
    for step in range(first, last + 1):
        for rank in range(2):
            spans, now_s = [], 0.0
            for action in SCHEDULE.programs[rank]:
                end_s = now_s + (2.0 if str(action.kind) == "B" and step <= middle else 1.0)
                spans.append(ActionSpan(action=str(action), start_s=now_s, end_s=end_s))
                now_s = end_s
            reports.append(
                TimelineReport(step=step, rank=rank, step_s=now_s, spans=tuple(spans), memory_bytes=0)
            )
    return reports


def running(
    spec: FreezeConfig,
    *log: events.Event,
    step: int = 0,
    replayed: bool = False,
    profile: Profile | None = None,
    **cluster: Any,
) -> Running:
    """A job of 100 steps after `step`, with `log` behind it."""
    section = {"freeze": spec.model_dump(mode="json"), "job": {"steps": 100}, "cluster": cluster}
    begun = events.Submitted(job="j", epoch=1, spec=section, resume=False)
    told = (begun, events.Issued(plan=PLAN), *(step_report(n) for n in range(1, step + 1)), *log)
    view: JobView = fold(events.Record(time_s=0.0, event=event) for event in told)
    replanner = Replanner(first=PLAN, schedule=SCHEDULE, parameters=(10**6,) * 2, copies=0, profile=profile)
    return Running(
        spec=spec,
        adaptive=False,
        view=view,
        plan=PLAN,
        schedule=SCHEDULE,
        coming=PLAN,
        profile=profile,
        replanner=replanner,
        domains=("a", "b"),
        replayed=replayed,
    )


def profiled(memory_bytes: int) -> Profile:
    """Two layers of a million parameters, 4 MB of weights each, on two devices."""
    return made_profile(["one", "two"], [10**6] * 2, 2, memory_bytes=memory_bytes)


def asked(job: Running, method: str | None = None, r_max: Budget | None = None) -> Adopt | Solve:
    return decided(WantedFreezing(method=method, r_max=r_max), job)


def changed(version: int, control: FreezeOverrides) -> events.FreezeChanged:
    plan = plan_of(control, PLAN, epoch=1, version=version)
    return events.FreezeChanged(from_step=2, method=control.method, r_max=control.r_max, by="", plan=plan)


MONITORED = (*timelines(3, 4, 6), FreezeStarted(plan=SOLVED))


def test_off_is_a_plan_without_ratios() -> None:
    off = asked(running(TIMELY, *MONITORED, step=20), "none")
    assert off == Adopt(control=FreezeOverrides(method="none", r_max=0.8))
    assert isinstance(off, Adopt)
    assert plan_of(off.control, PLAN, epoch=3, version=2).ratios == ((0.0, 0.0), (0.0, 0.0))
    assert described(off.control) == "freezes nothing from a commit on"


def test_another_r_max_is_solved_from_what_was_monitored() -> None:
    found = asked(running(TIMELY, *MONITORED, step=20), r_max=0.25)
    assert isinstance(found, Solve)
    assert found.control == FreezeOverrides(
        method="timelyfreeze", r_max=0.25, phases=PHASES, since=1, solved=True
    )
    assert (found.question.r_max, found.question.phases) == (0.25, PHASES)
    assert {seen.step for seen in found.observations} == {3, 4, 5, 6}
    # Also when it was off in between: the timelines of those steps do not count.
    off = replace(changed(2, FreezeOverrides(method="none", r_max=0.8)).plan, start=21)
    again = asked(running(TIMELY, *MONITORED, FreezeStarted(plan=off), step=30), "timelyfreeze+apf", 0.5)
    assert isinstance(again, Solve)
    assert again.observations == found.observations


def test_times_that_have_changed_ask_for_the_program_that_the_ranks_follow() -> None:
    slow = profiled(10**9)
    found = question_for_new_times(running(TIMELY, *MONITORED, step=20), slow)
    assert found is not None
    question, control = found
    assert (question.plan, question.r_max, question.phases, control) == (PLAN, 0.8, PHASES, None)
    assert question.profile is slow
    # A request that was solved keeps its settings.
    of_request = FreezeOverrides(method="timelyfreeze", r_max=0.25, phases=PHASES, since=3, solved=True)
    asked_for = FreezeStarted(plan=replace(SOLVED, version=2, control=of_request, start=12))
    found = question_for_new_times(running(TIMELY, *MONITORED, asked_for, step=20), slow)
    assert found is not None
    assert (found[0].r_max, found[0].phases.warm_up, found[1]) == (0.25, 4, of_request)


@pytest.mark.parametrize(
    ("spec", "log", "more"),
    [
        (NONE, (), {}),
        (TIMELY, timelines(3, 4, 4), {}),
        (TIMELY, MONITORED, {"replayed": True}),
        (TIMELY, (*MONITORED, changed(2, FreezeOverrides(method="none", r_max=0.8))), {}),
    ],
    ids=["nothing frozen", "still monitored", "replayed", "another plan under way"],
)
def test_where_the_ranks_follow_no_solution_nothing_is_solved_again(
    spec: FreezeConfig, log: tuple[events.Event, ...], more: dict[str, Any]
) -> None:
    assert question_for_new_times(running(spec, *log, step=20, **more), profiled(10**9)) is None


def test_as_much_as_pays_is_solved_from_what_was_monitored_and_bounded_by_a_request() -> None:
    """With a bound from the spec, then from a request; each is known to the next one."""
    spec = TIMELY.model_copy(update={"least_update": 0.7})
    found = asked(running(spec, *MONITORED, step=20), r_max=AUTO)
    assert isinstance(found, Solve)
    assert (found.question.r_max, found.question.least_update) == (AUTO, 0.7)
    assert found.control.named == "timelyfreeze with r_max = auto"
    job = running(spec.model_copy(update={"r_max": AUTO}), *MONITORED, step=20)
    less = decided(WantedFreezing(method=None, r_max=None, least_update=0.9), job)
    assert isinstance(less, Solve)
    assert less.question.least_update == 0.9
    assert less.control.named == "timelyfreeze with r_max = auto and least_update = 0.9"
    plan = replace(changed(2, less.control).plan, start=21)
    assert (plan.settings["r_max"], plan.settings["least_update"]) == (AUTO, 0.9)
    assert (job.view.freeze.r_max, job.view.freeze.least_update, job.view.freeze.since) == (AUTO, 0.7, 1)
    followed = running(job.spec, *MONITORED, FreezeStarted(plan=plan), step=22).view.freeze
    assert (followed.r_max, followed.least_update, followed.since) == (AUTO, 0.9, 21)
    then = running(
        job.spec.model_copy(update={"least_update": 0.9}), *MONITORED, FreezeStarted(plan=plan), step=22
    )
    again = decided(WantedFreezing(method=None, r_max=None, least_update=0.95), then)
    assert isinstance(again, Solve)
    assert again.question.least_update == 0.95
    assert question_for_new_times(then, profiled(10**9)) is None, (
        "nobody knows the gradients that it was solved by"
    )
    then.view.freeze.energies = (2.0, 1.0)
    found_again = question_for_new_times(then, profiled(10**9))
    assert found_again is not None
    assert (found_again[0].r_max, found_again[0].least_update) == (AUTO, 0.9)
    assert found_again[0].energies == (2.0, 1.0)
    with pytest.raises(JobError, match=r"least_update = 1\.5 is no share: give the least share"):
        decided(WantedFreezing(method=None, r_max=None, least_update=1.5), job)
    with pytest.raises(
        JobError, match=r"changes nothing with method timelyfreeze and r_max = 0\.8: give r_max auto"
    ):
        decided(
            WantedFreezing(method=None, r_max=None, least_update=0.5), running(TIMELY, *MONITORED, step=20)
        )


def test_monitoring_under_way_goes_on_with_another_r_max() -> None:
    found = asked(running(TIMELY, *timelines(3, 4, 4), step=4), r_max=0.25)
    assert found == Adopt(control=FreezeOverrides(method="timelyfreeze", r_max=0.25, phases=PHASES, since=1))
    assert isinstance(found, Adopt)
    assert (
        described(found.control) == "freezes by timelyfreeze with r_max = 0.25 once its monitoring has ended"
    )


@pytest.mark.parametrize("spec", [NONE, FreezeConfig(method="apf", warm_up=3)])
def test_without_times_the_job_monitors_first(spec: FreezeConfig) -> None:
    found = asked(running(spec, step=20), "timelyfreeze", 0.5)
    phases = Phases(warm_up=0, monitoring=10, ramp=20)
    assert found == Adopt(control=FreezeOverrides(method="timelyfreeze", r_max=0.5, phases=phases))
    assert isinstance(found, Adopt)
    # The planner gets its question once the ranks' first step is known, and only until it is solved.
    change = changed(1, found.control)
    view = running(spec, change, step=20).view
    assert open_question(spec, view) is None
    assert view.freeze_history().proposed == change.plan
    begun = FreezeStarted(plan=replace(change.plan, start=24))
    view = running(spec, change, begun, step=24).view
    assert view.freeze_history().proposed is None
    question = open_question(spec, view)
    assert question is not None
    assert question[0].phases == Phases(warm_up=23, monitoring=33, ramp=43)
    assert question[1] == replace(found.control, since=24, solved=True)
    assert (view.freeze.method, view.freeze.r_max, view.freeze.since) == ("timelyfreeze", 0.5, 24)
    assert [(band.name, band.first) for band in view.phases][-1] == ("monitoring, nothing frozen", 24)
    solved = replace(change.plan, version=2, control=question[1], start=35)
    view = running(spec, change, begun, FreezeStarted(plan=solved), step=36).view
    assert open_question(spec, view) is None
    assert view.freeze.since == 24


def test_times_of_another_partition_do_not_count() -> None:
    job = running(TIMELY, *MONITORED, step=20)
    other = replace(PLAN, layers=((0, 2),), stage_ranks=(0,))
    found = asked(replace(job, plan=other, schedule=schedule_of(other)), r_max=0.5)
    assert isinstance(found, Adopt)
    assert found.control.phases == Phases(warm_up=0, monitoring=10, ramp=20)


def test_a_method_without_a_program_needs_no_times() -> None:
    found = asked(running(NONE, step=99), "autofreeze")
    assert found == Adopt(control=FreezeOverrides(method="autofreeze", r_max=AUTO))


def test_copies_that_fit_the_devices_are_no_reason_to_refuse_a_method() -> None:
    roomy = running(NONE, profile=profiled(40_000_000), memory_per_rank_bytes=40_000_000)
    assert asked(roomy, "apf") == Adopt(control=FreezeOverrides(method="apf", r_max=AUTO))


def test_copies_must_fit_the_plan_that_requested_moves_lead_to() -> None:
    roomy = running(NONE, profile=profiled(36_000_000))
    both_on_one = replace(PLAN, layers=((0, 2),), stage_ranks=(0,))
    with pytest.raises(JobError, match="apf keeps four bytes for each weight, and they do not fit: place 0"):
        asked(replace(roomy, coming=both_on_one), "apf")


def test_copies_that_were_given_up_must_fit_again() -> None:
    """The spec's method kept them, and the plans made since then had no room for them."""
    spec = FreezeConfig(method="apf", warm_up=3)
    off = replace(changed(1, FreezeOverrides(method="none", r_max=0.8)).plan, start=5)
    tight = profiled(18_000_000)
    with pytest.raises(JobError, match="apf keeps four bytes for each weight, and they do not fit"):
        asked(running(spec, FreezeStarted(plan=off), step=9, profile=tight), "apf")
    # A method that keeps as many as the ranks have already takes no more room.
    assert isinstance(asked(running(spec, step=9, profile=tight), "timelyfreeze+apf"), Adopt)


def test_plans_have_room_for_the_copies_of_any_method_that_the_ranks_follow_or_will_follow() -> None:
    apf, off = (FreezeOverrides(method=method, r_max=0.8) for method in ("apf", "none"))
    on = changed(1, apf)
    assert method_to_plan_for(running(NONE).view.freeze) == "none"
    assert method_to_plan_for(running(NONE, on).view.freeze) == "apf"
    begun = FreezeStarted(plan=replace(on.plan, start=2))
    assert method_to_plan_for(running(NONE, on, begun).view.freeze) == "apf"
    # The copies are there until all ranks have taken the change up.
    out = changed(2, off)
    assert method_to_plan_for(running(NONE, on, begun, out).view.freeze) == "apf"
    over = FreezeStarted(plan=replace(out.plan, start=9))
    view = running(NONE, on, begun, out, over).view
    assert method_to_plan_for(view.freeze) == "none"
    # A job that replays a log follows its changes too.
    assert method_to_plan_for(view.freeze, [on.plan, out.plan]) == "apf"


@pytest.mark.parametrize(
    ("job", "method", "r_max", "words"),
    [
        (
            running(NONE),
            None,
            None,
            "names a method, its setting \\(r_max, least_update, alpha or prefix\\), or both",
        ),
        (running(NONE), "autofreez", None, "'autofreez' is no freeze method: did you mean autofreeze"),
        (running(TIMELY), None, 1.01, r"r_max = 1\.01 is no share"),
        (running(TIMELY), None, float("nan"), "r_max = nan is no share"),
        (running(NONE), None, 0.5, "changes nothing with method none: only a timelyfreeze method"),
        (running(TIMELY), "apf", 0.5, "changes nothing with method apf"),
        (running(NONE), "none", None, "is none already: there is nothing to change"),
        (running(TIMELY), "timelyfreeze", 0.8, "is timelyfreeze with r_max = 0.8 already"),
        (running(NONE, step=95), "timelyfreeze", 0.5, "5 of 100 steps left and no monitored times"),
        (running(TIMELY, replayed=True), "none", None, "replays the freezing of a log"),
        (running(NONE, memory_per_rank_bytes=10**9), "apf", None, "apf keeps four bytes for each weight"),
        (
            running(NONE, profile=profiled(18_000_000)),
            "apf",
            None,
            r"apf keeps four bytes for each weight, and they do not fit: place 0 would need 19,.* bytes",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(
    job: Running, method: str | None, r_max: float | None, words: str
) -> None:
    with pytest.raises(JobError, match=words):
        asked(job, method, r_max)


def wide(spec: FreezeConfig, *log: events.Event, step: int = 20, layers: int = 14) -> Running:
    """A job whose model has so many layers."""
    job = running(spec, *log, step=step)
    plan = even_plan(2, layers=layers)
    return replace(job, plan=plan, coming=plan)


def test_a_prefix_is_asked_for_with_its_number_and_changed_without_its_name() -> None:
    first = decided(WantedFreezing(method="prefix", r_max=None, prefix=6), wide(NONE))
    assert first == Adopt(control=FreezeOverrides(method="prefix", r_max=AUTO, prefix=6))
    assert described(first.control) == "freezes by prefix of 6 layers from a commit on"
    plan = replace(plan_of(first.control, PLAN, epoch=1, version=2), start=21)
    assert NONE.model_copy(update=plan.settings).prefix == 6
    more = decided(WantedFreezing(method=None, r_max=None, prefix=8), wide(NONE, FreezeStarted(plan=plan)))
    assert more == Adopt(control=FreezeOverrides(method="prefix", r_max=AUTO, prefix=8))
    by_schedule = FreezeConfig(method="prefix", schedule=((1, 2), (50, 4)))
    assert by_schedule.model_copy(update=plan.settings).schedule == ()


def test_a_job_that_chooses_goes_on_choosing_until_someone_else_asks() -> None:
    auto = TIMELY.model_copy(update={"method": "auto", "r_max": AUTO})
    layers = PLAN.layers[-1][1]
    profile = profiled(10**9)
    before = running(auto, *MONITORED, step=20, profile=profile)
    prefix = decided(WantedFreezing(method="prefix", r_max=None, prefix=layers - 1, chosen=True), before)
    assert isinstance(prefix, Adopt)
    assert (prefix.control.chosen, prefix.control.prefix) == (True, layers - 1)
    plan = replace(plan_of(prefix.control, PLAN, epoch=1, version=2), start=21)
    chose = running(auto, *MONITORED, FreezeStarted(plan=plan), step=30, profile=profile)

    back = decided(WantedFreezing(method="auto", r_max=None, chosen=True), chose)
    assert isinstance(back, Solve)
    assert (back.control.named, back.control.chosen, back.control.solved) == ("auto", True, True)
    assert (back.question.r_max, back.question.phases) == (AUTO, PHASES)

    someone = decided(WantedFreezing(method="none", r_max=None), chose)
    assert not someone.control.chosen
    pinned = decided(WantedFreezing(method="prefix", r_max=None, prefix=layers - 1), chose)
    assert (pinned.control.chosen, pinned.control.prefix) == (False, layers - 1)
    assert plan.settings["thaw"] == "never"
    wanted = WantedFreezing(method="auto", r_max=None)
    asked_for = decided(wanted, running(TIMELY, *MONITORED, step=20, profile=profile))
    assert (asked_for.control.r_max, asked_for.control.chooses) == (AUTO, True)
    with pytest.raises(JobError, match="this job has not measured its model: start it with"):
        decided(wanted, running(TIMELY, *MONITORED, step=20))
    with pytest.raises(JobError, match=r"r_max = 0\.5 does not go with method auto, which finds out"):
        asked(before, r_max=0.5)


def test_pipetransformer_is_asked_for_and_its_alpha_changed() -> None:
    first = decided(WantedFreezing(method="pipetransformer", r_max=None), wide(NONE))
    assert first == Adopt(control=FreezeOverrides(method="pipetransformer", r_max=AUTO))
    spec = FreezeConfig(method="pipetransformer", warm_up=0, check_every=5, alpha=0.25)
    then = decided(WantedFreezing(method=None, r_max=None, alpha=0.5), wide(spec))
    assert then == Adopt(control=FreezeOverrides(method="pipetransformer", r_max=AUTO, alpha=0.5))
    assert described(then.control) == "freezes by pipetransformer with alpha = 0.5 from a commit on"
    settings = spec.model_copy(
        update=replace(plan_of(then.control, PLAN, epoch=1, version=2), start=21).settings
    )
    assert (settings.alpha, settings.warm_up, settings.check_every) == (0.5, 20, 5)
    off = decided(WantedFreezing(method="none", r_max=None), wide(spec))
    assert off == Adopt(control=FreezeOverrides(method="none", r_max=AUTO, alpha=0.25))


@pytest.mark.parametrize(
    ("spec", "wanted", "why"),
    [
        (NONE, {"method": "prefix"}, "needs to know how many layers to freeze: give prefix too"),
        (
            NONE,
            {"method": "prefix", "prefix": 14},
            "freezes 14 layers, and the model has 14: .* give 13 at most",
        ),
        (NONE, {"method": "prefix", "prefix": -1}, "prefix = -1 is no number of layers"),
        (NONE, {"prefix": 3}, "prefix = 3 changes nothing with method none: it is for prefix"),
        (NONE, {"alpha": 0.5}, "alpha = 0.5 changes nothing with method none: it is for pipetransformer"),
        (NONE, {"method": "pipetransformer", "alpha": 1.0}, "alpha = 1 is no share"),
        (
            FreezeConfig(method="prefix", prefix=3),
            {"method": "prefix", "prefix": 3},
            "the freeze method is prefix of 3 layers already",
        ),
    ],
)
def test_a_prefix_that_cannot_be_is_refused_in_words(
    spec: FreezeConfig, wanted: dict[str, Any], why: str
) -> None:
    with pytest.raises(JobError, match=why):
        decided(WantedFreezing(**{"method": None, "r_max": None, **wanted}), wide(spec))


def test_a_model_with_too_few_layers_has_no_prefix_by_pipetransformer() -> None:
    with pytest.raises(JobError, match="the model has 2 layers: it takes at least 4"):
        decided(WantedFreezing(method="pipetransformer", r_max=None), running(NONE, step=20))


def test_a_program_is_solved_with_the_backward_passes_that_the_plan_drops() -> None:
    """Those of layers that are frozen as a whole by now, and are not with a program."""
    job = running(TIMELY, *MONITORED, step=20)
    plan = replace(PLAN, frozen=PLAN.layers[0][1])
    schedule = schedule_of(plan)
    assert schedule.frozen_stages == 1
    found = asked(replace(job, plan=plan, schedule=schedule), r_max=0.25)
    assert isinstance(found, Solve)
    assert (found.question.plan, found.question.schedule) == (PLAN, SCHEDULE)


ABOVE = FreezeConfig(
    method="timelyfreeze+prefix", prefix=1, r_max=0.8, warm_up=2, monitoring=6, ramp=8, check_every=10
)
ONE_FROZEN = PrefixFrozen(step=1, layers=1, bound=0.0, norms=(), names=())


def test_a_program_above_a_prefix_is_solved_for_the_layers_above_it() -> None:
    """From the monitored steps where the prefix was the same; with another one from the profile, and from the gradients
    told so far."""
    whole = profiled(10**9)
    job = running(ABOVE, ONE_FROZEN, *MONITORED, step=20, profile=whole)
    job.view.freeze.energies = (2.0, 1.0)
    less = asked(job, r_max=0.25)
    assert isinstance(less, Solve)
    assert less.control.named == "timelyfreeze+prefix of 1 layer with r_max = 0.25"
    assert less.question.profile == whole.with_prefix(1)
    assert {seen.step for seen in less.observations} == {3, 4, 5, 6}
    thawed = decided(WantedFreezing(method=None, r_max=None, prefix=0), job)
    assert isinstance(thawed, Solve)
    assert thawed.control.named == "timelyfreeze+prefix of 0 layers with r_max = 0.8"
    assert (thawed.control.phases, thawed.control.since, thawed.control.solved) == (PHASES, 1, True)
    assert thawed.observations == ()
    assert thawed.question.energies == (2.0, 1.0)
    assert thawed.question.profile is not None
    assert not any(layer.frozen for layer in thawed.question.profile.model.layers)
    # The prefix alone needs no times, and its number need not be said again.
    alone = asked(job, "prefix")
    assert alone == Adopt(control=FreezeOverrides(method="prefix", r_max=0.8, prefix=1))
    with pytest.raises(JobError, match=r"alpha = 0\.5 changes nothing with method timelyfreeze\+prefix"):
        decided(WantedFreezing(method=None, r_max=None, alpha=0.5), job)
    timely = running(TIMELY, *MONITORED, step=20, profile=whole)
    with pytest.raises(
        JobError, match=r"method timelyfreeze\+prefix needs to know how many layers to freeze"
    ):
        asked(timely, "timelyfreeze+prefix")
    with pytest.raises(JobError, match="and this job has not measured its model"):
        asked(running(TIMELY, *MONITORED, step=20), "timelyfreeze+prefix")


def test_monitoring_under_way_goes_on_above_the_same_prefix_alone() -> None:
    job = running(ABOVE, ONE_FROZEN, *timelines(3, 4, 4), step=4, profile=profiled(10**9))
    less = asked(job, r_max=0.25)
    assert less == Adopt(
        control=FreezeOverrides(method="timelyfreeze+prefix", r_max=0.25, prefix=1, phases=PHASES, since=1)
    )
    other = decided(WantedFreezing(method=None, r_max=None, prefix=0), job)
    assert other.control.phases == Phases(warm_up=0, monitoring=10, ramp=20)


def test_a_program_above_a_prefix_is_solved_for_new_times_of_the_layers_above() -> None:
    """Of a plan that has dropped the backward passes of the frozen stage, too; as soon as the prefix is told, before
    the step that it follows is; and of a prefix that has shrunk."""
    now = profiled(10**9)
    job = running(ABOVE, *MONITORED, step=20, profile=now)
    job.view.fold(events.Record(time_s=0.0, event=replace(ONE_FROZEN, step=22)))
    dropped = replace(PLAN, frozen=1)
    found = question_for_new_times(replace(job, plan=dropped, schedule=schedule_of(dropped)), now)
    assert found is not None
    question, control = found
    assert (question.plan, question.schedule, control) == (dropped, schedule_of(dropped), None)
    assert question.profile == now.with_prefix(1)
    job.view.fold(events.Record(time_s=0.0, event=replace(ONE_FROZEN, step=23, layers=0)))
    found = question_for_new_times(replace(job, plan=dropped, schedule=schedule_of(dropped)), now)
    assert found is not None
    assert found[0].plan.frozen == 0
    assert found[0].profile == now


def test_what_a_schedule_of_prefixes_frees_is_not_taken_for_thawed() -> None:
    rising = ABOVE.model_copy(update={"prefix": None, "schedule": ((1, 1),)})
    tight = profiled(18_000_000)
    job = running(rising, ONE_FROZEN, *MONITORED, step=20, profile=tight)
    job = replace(job, replanner=replace(job.replanner, frozen=1, released=1))
    assert isinstance(asked(job, r_max=0.25), Solve)
