"""The report of a job that freezes, and of one with a searched plan; other jobs' reports mention neither."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from random import Random

import pytest
from report_page import Page, times, tokens
from synthetic_run import (
    MICROBATCHES,
    PHASES,
    RANKS,
    RATIOS,
    STEPS,
    freezing_records,
    plan,
    records,
    solved,
    step_report,
    timelines,
)

from orchestrator.analysis.freeze_numbers import freeze_numbers
from orchestrator.analysis.freeze_steps import freeze_steps
from orchestrator.analysis.predicted_step import forward_speed, predict_newest
from orchestrator.events.types import (
    Formed,
    FreezeSolved,
    Issued,
    Record,
    Submitted,
    Warned,
)
from orchestrator.history.job_view import JobView, fold
from orchestrator.history.phase_bands import phase_at, phase_bands
from orchestrator.report.page import render
from orchestrator.report.run import freezing
from orchestrator.report.step.step_timeline import measured_step
from orchestrator.report.step.timeline import timeline
from planner.freezing import AUTO, is_reference
from planner.search.alternatives import Alternative
from workers.protocol.orders import CheckpointRef, Generation
from workers.protocol.reports import FreezeReport, FrozenAction, StepReport, TimelineReport


@pytest.fixture(scope="module")
def run() -> JobView:
    return fold(freezing_records())


@pytest.fixture(scope="module")
def page(run: JobView) -> str:
    return render(run)


def alternatives(
    name: str, layers: tuple[tuple[int, int], ...] | None, step_s: float | None, why: str = ""
) -> Alternative:
    return Alternative(
        name=name,
        schedule="1f1b",
        ranks=RANKS,
        microbatches=MICROBATCHES,
        layers=layers,
        predicted_step_s=step_s,
        why_not=why,
    )


def test_the_page_is_whole_and_refers_to_nothing_outside_itself(page: str) -> None:
    parsed = Page(page)
    for _, attributes in parsed.elements:
        assert not {"src", "style"} & attributes.keys()
        assert attributes.get("href", "#").startswith("#")  # a room of the page
    assert len(parsed.styles) == 1


def test_measured_and_predicted_lanes_stand_on_one_axis(run: JobView, page: str) -> None:
    (timeline,) = Page(page).timelines
    assert [group["name"] for group in timeline["groups"]] == ["measured", "predicted"]
    assert timeline["unit"] == "ms"
    measured, predicted = timeline["groups"]
    assert [sorted(tokens(lane)) for lane in measured["lanes"]] == [
        sorted(tokens(lane)) for lane in predicted["lanes"]
    ]
    for rank, lane in enumerate(measured["lanes"]):
        spans = run.timelines[rank].spans
        assert tokens(lane) == [span.action for span in spans]
        expected = [(1e3 * span.start_s, 1e3 * span.end_s) for span in spans]
        assert [t for span in times(timeline, lane) for t in span] == pytest.approx(
            [t for span in expected for t in span], abs=1e-3
        )
    assert "from the times of the monitoring phase, steps 21 to 30" in page


def test_an_older_step_is_shown_as_it_was_then(run: JobView) -> None:
    older = sorted(run.measured)[-2]
    found = measured_step(run, step=older)
    assert found is not None
    assert (found.step, found.ranks) == (older, run.measured[older])
    assert found.causes[1] is not None
    part = timeline(run, step=older)
    assert part is not None
    # It is of the monitoring phase, before there was a prediction.
    assert part.heading == f"Step {older} as measured"
    with pytest.raises(KeyError):
        measured_step(run, step=older + 10_000)


def test_a_step_of_an_earlier_partition_is_compared_with_no_plan(run: JobView) -> None:
    older, newest = sorted(run.measured)[-2:]
    changed = replace(run, measured_since=older)
    then, now = measured_step(changed, step=older), measured_step(changed, step=newest)
    assert then is not None
    assert (then.predicted, then.causes) == (None, (None, None))
    assert now is not None
    assert now.causes[1] is not None


def test_the_prediction_comes_from_the_monitored_times_and_the_ratios(run: JobView) -> None:
    predicted = predict_newest(run)
    assert predicted is not None
    assert list(predicted.frozen) == list(RATIOS)
    measured_s = max(report.step_s for report in run.timelines.values())
    assert predicted.step_s / measured_s == pytest.approx(1, abs=0.05)
    longest = {str(span.action): span.end_s - span.start_s for span in predicted.timeline[3]}
    assert longest["3B7"] == pytest.approx(0.004, rel=0.1)
    assert longest["3B0"] == pytest.approx(0.008 - 0.75 * 0.004, rel=0.1)


def test_ratios_that_rest_on_the_profile_are_told_of() -> None:
    run = JobView()
    run.fold(Record(time_s=0.0, event=solved()))
    assert run.notes == []
    run.fold(
        Record(time_s=0.0, event=replace(solved(), measured_unfrozen_s=None, measured_all_frozen_s=None))
    )
    assert [note.text.partition(":")[0] for note in run.notes] == [
        "The freeze ratios rest on the profile's times"
    ]


def test_in_the_ramp_a_share_of_the_ratios_is_predicted() -> None:
    half = (PHASES.monitoring + PHASES.ramp) // 2
    predicted = predict_newest(fold(freezing_records(steps=half)))
    assert predicted is not None
    assert list(predicted.frozen) == [(stage, microbatch, ratio / 2) for stage, microbatch, ratio in RATIOS]


def test_ratios_that_are_not_in_force_are_not_predicted() -> None:
    run = fold(freezing_records())
    followed = predict_newest(run)
    run.freeze.start = None
    left = predict_newest(run)
    assert followed is not None
    assert left is not None
    assert {share for _, _, share in left.frozen} == {0.0}
    assert left.step_s > followed.step_s


def test_a_change_of_the_machine_s_speed_is_told_by_the_forwards() -> None:
    run = fold(freezing_records())
    steady = predict_newest(run)
    assert steady is not None
    assert forward_speed(steady, run.timelines) == pytest.approx(1, abs=0.02)
    run.measured[STEPS] = {
        rank: replace(
            report,
            step_s=report.step_s * 2,
            spans=tuple(
                replace(span, start_s=2 * span.start_s, end_s=2 * span.end_s) for span in report.spans
            ),
        )
        for rank, report in run.measured[STEPS].items()
    }
    slowed = predict_newest(run)
    assert slowed is not None
    assert slowed.step_s == steady.step_s
    assert forward_speed(slowed, run.timelines) == pytest.approx(2, abs=0.05)
    told = re.findall(
        r"forward passes took ([\d.]+) of their predicted time: scaled by that, it is ([\d.]+) % too",
        render(run),
    )
    assert [(float(speed), float(off) < 3) for speed, off in told] == [(pytest.approx(2, abs=0.05), True)]


def test_without_a_solution_the_prediction_comes_from_earlier_measured_steps() -> None:
    log = records(steps=30)
    first = fold(log)
    assert predict_newest(first) is None
    earlier = [replace(report.event, step=10) for report in log if isinstance(report.event, TimelineReport)]
    for report in earlier:
        first.fold(Record(time_s=first.last_s, event=report))
    predicted = predict_newest(first)
    assert predicted is not None
    assert predicted.source == "from the mean times of 1 earlier measured step"
    assert "Step 30 measured and predicted" in render(first)
    # The time that ranks wait for another in the commit does not count as time outside the window.
    waiting = first.measured[10][3]
    first.measured[10][3] = replace(waiting, step_s=waiting.step_s + 1)
    assert predict_newest(first) == predicted


def shrunk(run: JobView, measured: Sequence[TimelineReport]) -> JobView:
    """`run` after a loss: the one pipeline left runs both replicas, as `measured` in the last step."""
    generation = Generation(
        number=2,
        epoch=1,
        members=tuple(range(RANKS)),
        store_host="10.0.0.4",
        store_port=29501,
        timeout_s=300.0,
    )
    last = measured[0].step
    run.recovery.generations[0].members = tuple(range(2 * RANKS))
    run.fold(Record(time_s=run.last_s, event=Formed(generation=generation, start=None, step=last - 1)))
    run.fold(Record(time_s=run.last_s, event=Issued(plan=replace(plan(), replicas=2, pipelines=1))))
    for report in measured:
        run.fold(Record(time_s=run.last_s, event=report))
    step = replace(step_report(last, Random(1)), generation=2, step_s=measured[0].step_s)
    run.fold(Record(time_s=run.last_s, event=step))
    return run


def test_a_pipeline_that_runs_several_replicas_is_predicted_with_all_its_windows() -> None:
    run, random = fold(records(steps=30)), Random(4)
    run.measured = {}
    for report in timelines(10, random):
        run.fold(Record(time_s=run.last_s, event=report))
        run.fold(Record(time_s=run.last_s, event=replace(report, rank=report.rank + RANKS)))
    run = shrunk(run, timelines(30, random, windows=2))
    predicted = predict_newest(run)
    assert predicted is not None
    assert predicted.step_s / run.timelines[0].step_s == pytest.approx(1, abs=0.05)
    for rank, spans in enumerate(predicted.timeline):
        assert [str(span.action) for span in spans] == [span.action for span in run.timelines[rank].spans]
        assert spans[-1].end_s == pytest.approx(run.timelines[rank].spans[-1].end_s, rel=0.05)
    assert forward_speed(predicted, run.timelines) == pytest.approx(1, abs=0.02)
    assert "Step 30 measured and predicted" in render(run)


def test_steps_with_freezing_are_predicted_with_the_windows_that_they_ran() -> None:
    ratios = {(stage, microbatch): ratio for stage, microbatch, ratio in RATIOS}
    before = freeze_steps(fold(freezing_records()))[-2]
    run = fold(freezing_records())
    run = shrunk(run, timelines(STEPS, Random(4), lambda *action: ratios[action], windows=2))
    predicted = predict_newest(run)
    assert predicted is not None
    assert list(predicted.frozen) == list(RATIOS)
    assert predicted.step_s / run.timelines[0].step_s == pytest.approx(1, abs=0.05)
    one, two = freeze_steps(run)[-2:]
    assert (one.step, two.step) == (STEPS - 1, STEPS)
    assert one.predicted_step_s == before.predicted_step_s
    assert one.predicted_kappa == before.predicted_kappa
    assert two.predicted_step_s == predicted.step_s
    Page(render(run))


@pytest.mark.parametrize("spoilt", ["one window less", "cut off", "in a circle"])
def test_spans_that_are_no_whole_windows_show_only_what_was_measured(spoilt: str) -> None:
    run = fold(records(steps=30))
    run.measured[10] = run.measured[30]
    run = shrunk(run, timelines(30, Random(4), windows=2))
    spans = run.timelines[1].spans
    swapped = list(spans[: 2 * MICROBATCHES])
    forward, backward = (
        next(n for n, span in enumerate(swapped) if span.action == token) for token in ("1F7", "1B0")
    )
    swapped[forward], swapped[backward] = swapped[backward], swapped[forward]
    left = {
        "one window less": spans[: 2 * MICROBATCHES],
        "cut off": spans[:-1],
        "in a circle": (*swapped, *swapped),
    }
    run.measured[30][1] = replace(run.timelines[1], spans=left[spoilt])
    assert predict_newest(run) is None
    assert "Step 30 as measured" in render(run)


def test_a_log_that_lacks_a_rank_or_does_not_fit_its_plan_shows_only_what_was_measured(
    run: JobView,
) -> None:
    lame = fold(freezing_records())
    del lame.measured[STEPS][2]
    assert predict_newest(lame) is None
    assert "Step 200 as measured" in render(lame)
    other = fold(freezing_records())
    for step in range(PHASES.warm_up, PHASES.monitoring + 1):
        other.measured.pop(step, None)
    assert predict_newest(other) is None
    Page(render(other))


def test_the_heat_map_has_a_cell_per_stage_and_microbatch_with_its_value(page: str) -> None:
    picture = page[page.index('<table class="heat"') :].split("</table>")[0]
    cells = re.findall(r'title="stage (\d+), microbatch (\d+): ([\d.]+) % frozen', picture)
    assert [(int(s), int(m), float(share) / 100) for s, m, share in cells] == [
        (stage, microbatch, pytest.approx(ratio)) for stage, microbatch, ratio in RATIOS
    ]
    assert ">75</td>" in picture
    assert "from step 31 on" in picture


def test_phases_are_marked_as_bands_over_the_steps(page: str) -> None:
    parsed = Page(page)
    bands = [[1, 20, 0], [21, 25, 1], [26, 30, 2], [31, 60, 3], [61, 200, 4]]
    for title in ("Throughput", "Step time", "Freeze ratio", "Effective update (p_eff)"):
        assert parsed.charts[title]["bands"] == bands
    for words in (
        "warm-up 1–20",
        "monitoring, nothing frozen 21–25",
        "monitoring, all frozen 26–30",
        "ramp 31–60",
        "stable 61–200",
        "warm-up: steps 1 to 20. monitoring, nothing frozen: steps 21 to 25.",
    ):
        assert words in parsed.text


def test_changes_of_the_plan_are_marked_on_all_curves_over_steps() -> None:
    log = freezing_records()
    at = next(
        number
        for number, each in enumerate(log)
        if isinstance(each.event, StepReport) and each.event.step == 90
    )
    again = Record(time_s=log[at].time_s, event=Issued(plan=replace(plan(), version=2)))
    charts = Page(render(fold([*log[: at + 1], again, *log[at + 1 :]]))).charts
    for title in ("Loss", "Step time", "Freeze ratio", "Effective update (p_eff)"):
        assert charts[title]["changes"] == [90], title


def test_the_paper_s_numbers_and_the_warning_stand_on_the_page(run: JobView, page: str) -> None:
    numbers = freeze_numbers(run)
    assert numbers is not None
    assert numbers.p_eff == pytest.approx(0.37)
    assert numbers.predicted_kappa == 0.763
    assert numbers.kappa == pytest.approx(0.79, abs=0.02)
    assert numbers.time_to_accuracy == pytest.approx((numbers.kappa or 0) / 0.37)
    # Five steps are at 1; from the ramp on the mean of the drawn ratios is about 0.67.
    assert numbers.average_freeze_ratio == pytest.approx((5 + 0.677 * (15.5 + 140)) / 200, abs=0.01)
    text = Page(page).text
    for words in (
        "Freezing",
        "kappa",
        "p_eff",
        "freezing costs more than it brings",
        "unfrozen 132 ms, all frozen 88.0 ms",
    ):
        assert words in text, words
    assert freeze_numbers(fold(records())) is None


def test_a_run_that_lets_nothing_through_never_gets_there() -> None:
    log = [
        replace(record, event=replace(record.event, effective_update=0.0))
        if isinstance(record.event, StepReport)
        else record
        for record in freezing_records()
    ]
    numbers = freeze_numbers(fold(log))
    assert numbers is not None
    assert numbers.p_eff == 0
    assert numbers.time_to_accuracy == math.inf
    text = Page(render(fold(log))).text
    for words in (
        "Time to accuracy",
        "∞",
        "no update is let through",
        "the loss is expected to stay where it is",
    ):
        assert words in text, words
    assert "inf times" not in text


def test_a_skipped_step_does_not_spoil_the_average_update() -> None:
    run = fold(freezing_records())
    run.steps[STEPS] = replace(run.steps[STEPS], skipped=True, gradient_energy=float("inf"))
    numbers = freeze_numbers(run)
    assert numbers is not None
    assert numbers.p_eff == pytest.approx(0.37)


def test_the_predicted_step_time_is_drawn_beside_the_measured_one(run: JobView, page: str) -> None:
    measured, predicted = Page(page).charts["Step time"]["series"]
    assert (measured["name"], predicted["name"]) == ("measured", "predicted")
    step_s = freeze_steps(run)[-1].predicted_step_s
    assert step_s is not None
    assert predicted["y"][-1] == pytest.approx(step_s * 1e3, rel=1e-3)
    assert predicted["x"][0] == PHASES.monitoring + 1
    assert len(Page(render(fold(records()))).charts["Step time"]["series"]) == 1


def test_there_is_no_warning_while_freezing_pays() -> None:
    log = [
        replace(record, event=replace(record.event, effective_update=0.95))
        if isinstance(record.event, StepReport)
        else record
        for record in freezing_records()
    ]
    assert "freezing costs more" not in render(fold(log))


def slowed(share: float, kappa: float, **freeze: object) -> JobView:
    """A job whose steps after the 30th pass on `share` of the gradient and take `kappa` times as long."""
    run = fold(records())
    run.spec = {**run.spec, "freeze": freeze}
    for number, step in run.steps.items():
        frozen = number > PHASES.monitoring
        run.steps[number] = replace(
            step,
            step_s=kappa if frozen else 1.0,
            effective_update=share if frozen else 1.0,
            gradient_energy=1.0,
        )
    return run


TIMELY = {"method": "timelyfreeze", **asdict(PHASES)}


@pytest.mark.parametrize("freeze", [TIMELY, {"method": "apf", "warm_up": PHASES.monitoring}])
def test_where_nothing_was_frozen_noise_is_no_cost_of_freezing(freeze: dict[str, object]) -> None:
    run = slowed(1.0, 1.003, **freeze)
    for start in (None, PHASES.monitoring + 1):  # never solved; solved with r_max 0
        run.freeze.start = start
        numbers = freeze_numbers(run)
        assert numbers is not None
        assert (numbers.kappa, numbers.p_eff, numbers.warning) == (None, None, None)
        assert "freezing costs more" not in render(run)


def test_steps_that_run_whole_are_compared_with_those_around_them() -> None:
    """However much slower the machine has become since the monitored steps."""
    run, solution = slowed(0.9, 0.8, **TIMELY, r_max=AUTO), fold(freezing_records()).freeze.solved
    assert solution is not None
    run.freeze.start = PHASES.ramp + 1
    for number, step in run.steps.items():
        whole = is_reference(number, PHASES, AUTO)
        run.steps[number] = replace(
            step,
            step_s=(1.0 if whole else step.step_s) * (1 + number / 20),
            effective_update=1.0 if whole else step.effective_update,
        )
    numbers = freeze_numbers(run)
    assert numbers is not None
    assert numbers.kappa == pytest.approx(0.8, rel=0.02)
    assert numbers.p_eff == pytest.approx(0.9)
    run.freeze.solved = replace(solution, progress=0.7)
    numbers = freeze_numbers(run)
    assert numbers is not None
    assert numbers.warning is None, "the job freezes less by itself"
    assert numbers.time_to_accuracy == pytest.approx(0.8 / 0.7, rel=0.02)
    run.freeze.solved = None
    for number in [number for number in run.steps if number > 111]:
        del run.steps[number]
    numbers = freeze_numbers(run)
    assert numbers is not None
    assert numbers.kappa is None, "four pairs are too few"


def test_full_freezing_begins_with_the_step_that_follows_the_solution() -> None:
    run = slowed(0.5, 0.75, **TIMELY)
    run.freeze.start = 151
    for number in range(PHASES.monitoring + 1, 151):
        run.steps[number] = replace(run.steps[number], step_s=1.0, effective_update=1.0)
    numbers = freeze_numbers(run)
    assert numbers is not None
    assert (numbers.kappa, numbers.p_eff) == (0.75, 0.5)
    run.freeze.start = None
    numbers = freeze_numbers(run)
    assert numbers is not None
    assert (numbers.kappa, numbers.p_eff, numbers.warning) == (None, None, None)


def test_steps_of_fewer_ranks_are_not_held_against_those_of_more() -> None:
    run = slowed(0.5, 0.75, method="apf", warm_up=PHASES.monitoring)
    run = shrunk(run, timelines(STEPS + 1, Random(4), windows=2))
    last = run.steps[STEPS + 1]
    run.steps[STEPS + 1] = replace(last, step_s=1.5, effective_update=0.5, gradient_energy=1.0)
    numbers = freeze_numbers(run)
    assert numbers is not None
    assert (numbers.kappa, numbers.p_eff, numbers.warning) == (None, 0.5, None)
    assert "freezing costs more" not in render(run)


def test_steps_before_anything_settled_are_not_held_against_those_with_nothing_frozen() -> None:
    run = slowed(0.5, 0.75, method="autofreeze", warm_up=20)
    numbers = freeze_numbers(run)
    assert numbers is not None
    assert (numbers.kappa, numbers.p_eff) == (0.75, 0.5)
    assert "Lower freeze.autofreeze_percentile, or" in render(run)


def test_each_rank_has_a_histogram_of_its_parameters(page: str) -> None:
    drawn = {title: chart for title, chart in Page(page).charts.items() if title.startswith("Rank ")}
    assert list(drawn) == [f"Rank {rank}: how often each parameter was frozen" for rank in range(RANKS)]
    first = drawn["Rank 0: how often each parameter was frozen"]
    assert first["kind"] == "bars"
    assert first["x"]["range"] == [0, 100]
    assert sum(first["series"][0]["y"]) == 12


def test_histograms_of_many_ranks_are_one(run: JobView) -> None:
    many = fold(freezing_records())
    for rank in range(RANKS, 9):
        told = FreezeReport(step=STEPS, rank=rank, actions=(), passes=10, counts=((10 + rank, (10, 0)),))
        many.fold(Record(time_s=many.last_s, event=told))
    html = render(many)
    assert "All ranks: how often each parameter was frozen" in html
    assert "Rank 0: how often" not in html


def test_parameters_are_counted_over_all_steps_whichever_rank_held_them(run: JobView) -> None:
    assert "Over all 200 steps; each layer counts at the rank that held it last.</p>" in render(run)
    # Layers 2 and 3 had moved to ranks 1 and 2 before step 200; rank 3 was lost before it reported step 199.
    moved = [(0, (0, 1)), (1, (2,)), (2, (3, 4, 5, 6)), (3, (7, 8, 9))]
    shifted = JobView()
    for record in freezing_records():
        event = record.event
        if isinstance(event, FreezeReport) and event.step == STEPS:
            layers = moved[event.rank][1]
            event = replace(event, counts=tuple((layer, event.counts[0][1]) for layer in layers))
        if not (isinstance(event, FreezeReport) and (event.step, event.rank) == (STEPS - 1, 3)):
            shifted.fold(Record(time_s=record.time_s, event=event))
    html = render(shifted)
    charts = Page(html).charts
    for rank, layers in moved:
        (bars,) = charts[f"Rank {rank}: how often each parameter was frozen"]["series"]
        assert sum(bars["y"]) == 4 * len(layers)
    counted = shifted.freeze.counted.add_up(shifted.step, lambda steps: steps * MICROBATCHES)
    assert counted is not None
    assert (counted.steps, counted.whole) == (200, 199)
    assert [counted.layers[layer].passes for layer in (0, 9)] == [200 * MICROBATCHES, 199 * MICROBATCHES]
    assert "Complete for 199 of them" in html


def test_what_is_told_again_counts_once(run: JobView) -> None:
    again = JobView()
    for record in freezing_records():
        again.fold(record)
        if isinstance(record.event, FreezeReport):
            again.fold(record)
    assert again.freeze == run.freeze


def test_no_bar_is_cut_off() -> None:
    chart = freezing.histogram([0.3] * 13 + [0.25] * 4, "t", "parameters")
    assert (chart.values.high > 13, chart.values.above) == (True, 0)


def test_every_share_falls_into_one_bin() -> None:
    assert freezing.bins([0.0, 0.049, 0.05, 0.999, 1.0]) == [2, 1, *[0] * 16, 0, 2]
    assert sum(freezing.bins([step / 40 for step in range(41)])) == 41


def test_a_method_without_a_solution_shows_what_was_frozen_recently() -> None:
    run = fold(records(steps=40))
    run.spec = {**run.spec, "freeze": {"method": "apf", "warm_up": 10}}
    action = FrozenAction(stage=1, microbatch=2, planned=0.5, actual=0.25, parameters=0.3)
    for step in range(11, 41):
        run.fold(Record(time_s=run.last_s, event=FreezeReport(step=step, rank=1, actions=(action,))))
    html = render(run)
    assert "stage 1, microbatch 2: 25.0 % frozen" in html
    assert "Share of weight-gradient time frozen in recent steps" in html
    numbers = freeze_numbers(run)
    assert numbers is not None
    assert numbers.average_freeze_ratio == pytest.approx(0.3 * 30 / 40)
    assert "freezing: steps 11 to 40" in html


def test_a_resume_voids_what_was_frozen_after_its_checkpoint() -> None:
    run = fold(freezing_records())
    formed = next(r.event for r in records(steps=1) if isinstance(r.event, Formed))
    run.fold(
        Record(time_s=run.last_s, event=replace(formed, start=CheckpointRef(path="s", step=40), step=40))
    )
    assert max(run.freeze.steps) == 40
    assert max(run.measured) == PHASES.monitoring
    Page(render(run))


@pytest.mark.parametrize("kept", [1, 2, 8, 30, 60, 120, 180, 260, 400])
def test_a_freezing_log_that_breaks_off_anywhere_still_gives_a_page(kept: int) -> None:
    Page(render(fold(freezing_records()[:kept])))


def test_a_job_that_never_freezes_says_nothing_of_it() -> None:
    html = render(fold(records()))
    for words in (
        ">Freezing<",
        "kappa",
        'class="b0"',
        'class="heat"',
        "Plans considered",
        "Predicted step",
    ):
        assert words not in html, words


def test_what_the_planner_warns_of_is_a_note() -> None:
    run = fold(records(steps=3))
    run.fold(Record(time_s=run.last_s, event=Warned(text="freezing < does not pay")))
    assert "freezing &lt; does not pay" in render(run)


def test_the_plan_stands_beside_each_program_s_own_pick() -> None:
    taken = replace(
        plan(),
        partition="dynpipe",
        predicted_step_s=0.131,
        predicted_bubble=0.27,
    )
    picks = (
        alternatives("parameter", ((0, 4), (4, 6), (6, 8), (8, 10)), 0.14, "6.9 % slower"),
        alternatives("dynpipe", taken.layers, 0.131),
        alternatives("memory", None, None, "does not <fit>"),
        replace(alternatives("bottleneck", taken.layers, 0.12, "other"), schedule="gpipe"),
    )
    log = [
        Record(time_s=record.time_s, event=Issued(plan=taken, alternatives=picks))
        if isinstance(record.event, Issued)
        else record
        for record in records()
    ]
    assert Record.from_json(log[1].to_json()) == log[1]
    html = render(fold(log))
    rows = re.findall(r"<tr><td>(\w+)</td><td>([\w-]+)</td>.*?</tr>", html[html.index("Plans considered") :])
    assert rows == [("dynpipe", "1f1b"), ("parameter", "1f1b"), ("memory", "1f1b"), ("bottleneck", "gpipe")]
    assert html.count('<span class="pill good">taken</span>') == 1
    text = Page(html).text
    for words in ("131 ms", "3 + 2 + 2 + 3", "does not <fit>", "27.0%", "measured 13"):
        assert words in text, words


def test_bands_follow_the_method() -> None:
    assert phase_bands([(1, {"method": "none"})], 100) == ()
    assert phase_bands([(1, {})], 100) == ()
    apf = phase_bands([(1, {"method": "apf", "warm_up": 10, "monitoring": None, "ramp": None})], 30)
    assert [(band.name, band.first, band.last) for band in apf] == [("warm-up", 1, 10), ("freezing", 11, 30)]
    timely = {"method": "timelyfreeze", "warm_up": 0, "monitoring": 4, "ramp": 4}
    assert [(band.name, band.first, band.last) for band in phase_bands([(1, timely)], 9)] == [
        ("monitoring, nothing frozen", 1, 2),
        ("monitoring, all frozen", 3, 4),
        ("stable", 5, 9),
    ]
    assert phase_at(phase_bands([(1, timely)], 9), 4) == "monitoring, all frozen"
    assert phase_at((), 4) is None


def test_the_newest_solution_is_shown() -> None:
    log = freezing_records()
    again = replace(solved(), ratios=((0, 0, 0.5),), solve_s=0.5)
    run = fold([*log, Record(time_s=log[-1].time_s, event=again)])
    assert isinstance(run.freeze.solved, FreezeSolved)
    assert run.freeze.solved.solve_s == 0.5


def test_the_spec_of_the_newest_start_says_the_method() -> None:
    log = freezing_records()
    run = fold(log)
    unfrozen = Submitted(job="python-docs-gpt", epoch=2, spec={"freeze": {"method": "none"}}, resume=True)
    run.fold(Record(time_s=run.last_s, event=unfrozen))
    assert freeze_numbers(run) is None
