"""The metrics of a job: each has its value, and the table says all there is."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from eventful_run import CHECKPOINT, COPIED, LAST, PARTS, STEPS, eventful, regrouped, standbys, switched
from prometheus_client.parser import text_string_to_metric_families
from synthetic_run import RANKS

from orchestrator.analysis.job_summary import job_summary
from orchestrator.events import types as events
from orchestrator.events.types import Record
from orchestrator.history.job_view import JobView, fold
from orchestrator.history.totals import PARTS as RECOVERY_PARTS
from orchestrator.lifecycle.migration import Mode
from orchestrator.telemetry.exposition import exposition
from orchestrator.telemetry.metrics import CAUSES, METRICS, MODES
from orchestrator.telemetry.samples import places_without_redundancy, samples
from planner.freezing import FreezeOverrides, FreezePlan
from planner.shards import Piece, Shard
from workers.protocol.reports import FreezeStarted, StandbyReport

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def view() -> JobView:
    return fold(eventful().records)


def values(view: JobView) -> dict[tuple[str, ...], float]:
    """(name without its prefix, labels...) -> value."""
    return {
        (sample.metric.name.removeprefix("freshet_"), *sample.labels): sample.value
        for sample in samples(view)
    }


def take(view: JobView, *logged: events.Event) -> None:
    for event in logged:
        view.fold(Record(time_s=view.last_s + 1, event=event))


def test_the_summary_and_the_metrics_tell_one_pace_of_the_newest_generation() -> None:
    """Half of the newest steps were run by fewer ranks, much more slowly."""
    view = fold(eventful().records)
    numbers = sorted(view.steps)[-20:]
    for place, number in enumerate(numbers):
        newer = place >= 10
        view.steps[number] = replace(
            view.steps[number], generation=9 if newer else 8, step_s=0.1 + place / 100 if newer else 0.8
        )
    found, summary = values(view), job_summary(view)
    newest = [view.steps[number] for number in numbers[10:]]
    assert summary.step_s == found["step_seconds",] == pytest.approx((0.24 + 0.25) / 2)
    tokens, seconds = sum(each.tokens for each in newest), sum(each.step_s for each in newest)
    assert summary.tokens_per_s == found["tokens_per_second",] == pytest.approx(tokens / seconds)


def test_every_metric_of_the_table_has_a_value_and_no_other_has(view: JobView) -> None:
    assert {sample.metric for sample in samples(view)} == set(METRICS)
    assert len(values(view)) == len(samples(view)), "no series twice"


def test_values_are_those_of_the_run(view: JobView) -> None:
    found = values(view)
    newest = view.steps[LAST]
    assert found["step",] == LAST
    assert found["loss",] == newest.loss
    assert found["gradient_norm",] == newest.grad_norm
    assert found["last_step_timestamp_seconds",] == newest.committed_s
    assert found["validation_loss",] == 1.9
    assert found["predicted_step_ratio",] == pytest.approx(0.12 / found["step_seconds",])
    assert 0.1 < found["step_seconds",] < 0.2
    assert found["tokens_total",] == sum(report.tokens for report in view.steps.values()) + 10 * newest.tokens
    assert found["steps_rerun_total",] == 1 + STEPS - CHECKPOINT
    assert found["ranks_lost_total", "loss"] == 1
    assert {part: found["recovery_seconds_total", "loss", part.removesuffix("_s")] for part in PARTS} == PARTS
    assert found["planner_seconds", "recovery"] == PARTS["plan_s"]
    assert found["moves_total", "live"] == 1
    assert found["rank_memory_bytes", "3"] == 4 * 2**20
    assert found["rank_slowdown_ratio", "3"] == pytest.approx(2.0, rel=0.3)
    assert found["rank_slowdown_ratio", "0"] == pytest.approx(1.0, rel=0.2)
    assert [found["job_state", state] for state in ("training", "failed")] == [1, 0]
    assert (found["ranks",], found["checkpoint_step",]) == (RANKS, CHECKPOINT)


def test_time_that_made_no_progress_lowers_the_ratio(view: JobView) -> None:
    """Ten of seventy steps were voided, a recovery took 3.875 s, and nothing was committed for 1.5 s at the end."""
    at_s = {commit.step: commit.time_s for commit in view.recovery.commits if commit.voided_by is None}
    first = view.recovery.commits[0]
    begin_s = first.time_s - first.step_s
    trains_s = view.recovery.generations[1].trains_s
    assert trains_s is not None
    stands_s = at_s[CHECKPOINT] - begin_s + at_s[LAST] - trains_s
    ratio = values(view)["training_time_ratio",]
    assert ratio == pytest.approx(stands_s / (view.last_s - begin_s))
    assert 0.5 < ratio < 0.7


def test_a_rank_is_without_redundancy_until_its_copies_are_up_to_date() -> None:
    view = fold(eventful().records)
    alone = ("ranks_without_redundancy",)
    assert values(view)[alone] == 0
    take(view, switched(2, LAST, view.last_s))
    assert values(view)[alone] == 1, "the copies that place 2 keeps are those of place 1"
    take(view, standbys(2, LAST))
    assert values(view)[alone] == 0
    take(view, replace(standbys(2, LAST), given_up=True))
    assert values(view)[alone] == 1, "its host has no memory for them"
    view.ranks.copied.clear()
    assert values(view)[alone] == RANKS
    view.spec = {**view.spec, "elastic": {"redundancy": "checkpoint"}}
    assert alone not in values(view), "the job wants none"


def test_of_the_copies_that_a_place_keeps_each_shard_counts() -> None:
    view = fold(eventful().records)
    first, second = (tuple(Piece(layer, Shard(number, 2)) for number in range(2)) for layer in range(2))
    view.followed = replace(
        COPIED,
        layers=((0, 1), (1, 2)),
        stage_ranks=(0, 1),
        replicas=2,
        pipelines=2,
        shard="optimizer",
        standbys=((1,), (1,), (0,), (0,)),
    )
    view.ranks.copied.clear()
    report = StandbyReport(step=LAST, rank=1, layers=(0,), bytes=1, seconds=0.1, shards=first)
    take(view, report, replace(report, rank=0, layers=(1,), shards=second[:1]))
    assert places_without_redundancy(view) == (3,)
    take(view, replace(report, shards=first[1:], given_up=True))
    assert places_without_redundancy(view) == (2, 3)
    assert view.ranks.copied == {1: first[:1], 0: second[:1]}


def test_the_freeze_ratio_is_zero_once_freezing_is_off() -> None:
    view = fold(eventful().records)
    assert values(view)["freeze_ratio",] > 0

    def off_from(start: int) -> FreezeStarted:
        control = FreezeOverrides(method="none", r_max=0.8)
        return FreezeStarted(plan=FreezePlan(epoch=1, version=2, ratios=(), control=control, start=start))

    take(view, off_from(LAST + 1))
    assert values(view)["freeze_ratio",] > 0, "the newest step still froze"
    take(view, off_from(LAST))
    assert values(view)["freeze_ratio",] == 0


def test_counters_never_fall_and_survive_a_snapshot(view: JobView) -> None:
    again = JobView.from_json(view.to_json())
    before = values(again)
    for number in range(500):  # more than a view keeps
        take(again, regrouped(step=LAST, generation=3 + number))
    after = values(again)
    assert after["recoveries_total", "loss"] == 501
    counted = {metric.name.removeprefix("freshet_") for metric in METRICS if metric.kind == "counter"}
    assert all(after[series] >= value for series, value in before.items() if series[0] in counted)


def test_a_job_that_has_not_begun_has_few_values() -> None:
    found = values(JobView(job="new", state="starting", started_s=5.0))
    assert (found["step",], found["last_step_timestamp_seconds",]) == (0, 5.0)
    assert ("loss",) not in found


def test_every_counter_is_0_before_it_counts_for_each_value_of_its_labels() -> None:
    """An increase can only be seen from 0."""
    new = JobView(job="new", state="starting")
    known = {"cause": CAUSES, "part": RECOVERY_PARTS, "mode": MODES}
    series = [
        (metric.name.removeprefix("freshet_"), *labels)
        for metric in METRICS
        if metric.kind == "counter"
        for labels in product(*(known[label] for label in metric.labels))
    ]
    assert {each: values(new)[each] for each in series} == dict.fromkeys(series, 0)


def test_the_modes_of_moves_are_those_of_the_lifecycle() -> None:
    assert get_args(Mode) == MODES


def test_the_exposition_is_prometheus_text(view: JobView) -> None:
    other = JobView(job='an "odd" \\ name', trouble="it has no controller")
    text = exposition([view, other])
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert all(set(sample.labels) == {"job", *metric.labels} for sample in family.samples)
    up = {sample.labels["job"]: sample.value for sample in families["freshet_controller_up"].samples}
    assert up == {view.job: 1.0, other.job: 0.0}
    assert len([line for line in text.splitlines() if not line.startswith("#")]) == len(samples(view)) + len(
        samples(other)
    )


def test_the_guide_has_the_table() -> None:
    page = (ROOT / "docs" / "guides" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(freshet_\w+)` \| (\w+) \| (.*?) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert rows == [
        (
            metric.name,
            metric.kind,
            metric.unit or "–",
            ", ".join(f"`{label}`" for label in metric.labels) or "–",
            metric.help,
        )
        for metric in METRICS
    ]


def test_names_follow_prometheus_conventions() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"freshet_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
    assert COPIED.standbys_of(1), "the run that is tested keeps copies"
