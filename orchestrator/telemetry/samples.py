"""The values of a job's metrics. Pure: a view in, samples out; knows neither Ray nor Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.analysis.achieved import compute_now, epochs_done, time_to_target_s
from orchestrator.analysis.throughput import pace
from orchestrator.analysis.training_time import training_time_ratio
from orchestrator.history.job_view import JobView
from orchestrator.history.totals import PARTS
from orchestrator.telemetry.metrics import BY_NAME, CAUSES, MODES, STATES, Metric
from planner.ir import Action, ActionKind
from workers.protocol.reports import TimelineReport


@dataclass(frozen=True)
class MetricSample:
    """One value of a metric."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()
    """Values of `metric.labels`, in their order."""


def samples(view: JobView) -> list[MetricSample]:
    """All values that `view` has. What has no value yet is left out; a counter that has not counted is 0."""
    return [*_state(view), *_steps(view), *_freezing(view), *_ranks(view), *_recoveries(view)]


def _sample(name: str, value: float, *labels: object) -> MetricSample:
    metric = BY_NAME[f"freshet_{name}"]
    assert len(labels) == len(metric.labels), name
    return MetricSample(metric, float(value), tuple(map(str, labels)))


def _state(view: JobView) -> Iterator[MetricSample]:
    for state in STATES:
        yield _sample("job_state", view.state == state, state)
    yield _sample("controller_up", not view.trouble)
    yield _sample("step", view.step)
    yield _sample("last_step", view.last_step)
    yield _sample("tokens_total", view.tokens)


def _trains(view: JobView) -> bool:
    """Whether its ranks are at work: of others no alert may say that they are slow."""
    return view.state == "training"


def _steps(view: JobView) -> Iterator[MetricSample]:
    committed_s = max((commit.time_s for commit in view.recovery.commits[-1:]), default=0.0)
    yield _sample("last_step_timestamp_seconds", max(committed_s, view.started_s))
    if view.steps:
        newest = view.steps[max(view.steps)]
        yield _sample("loss", newest.loss)
        yield _sample("gradient_norm", newest.grad_norm)
        yield _sample("learning_rate", newest.lr)
        yield _sample("bubble_ratio", newest.bubble)
        yield from _rates(view)
    if view.validations:
        validation = view.validations[max(view.validations)]
        yield _sample("validation_loss", validation.loss)
        for name, value in validation.metrics.items():
            yield _sample("validation_metric", value, name)
    if (to_target_s := time_to_target_s(view)) is not None:
        yield _sample("time_to_target_seconds", to_target_s)
    if (ratio := training_time_ratio(view)) is not None:
        yield _sample("training_time_ratio", ratio)


def _rates(view: JobView) -> Iterator[MetricSample]:
    now = pace(view)
    if now is None:
        return
    yield _sample("step_seconds", now.step_s)
    if now.per_s is not None:
        yield _sample("tokens_per_second", now.per_s)
    yield from _use(view)
    plan = view.followed or view.plan
    if plan is not None and plan.predicted_step_s is not None:
        yield _sample("predicted_step_seconds", plan.predicted_step_s)
        if now.step_s > 0 and _trains(view):
            yield _sample("predicted_step_ratio", plan.predicted_step_s / now.step_s)


def _use(view: JobView) -> Iterator[MetricSample]:
    if (used := compute_now(view)) is not None:
        yield _sample("samples_per_hour", used.samples_per_hour)
        if used.flops_per_s is not None:
            yield _sample("flops_per_second", used.flops_per_s)
        if used.mfu is not None:
            yield _sample("mfu_ratio", used.mfu)
    if (epochs := epochs_done(view)) is not None:
        yield _sample("epochs", epochs)


def _freezing(view: JobView) -> Iterator[MetricSample]:
    # The newest step may lack the reports of some ranks.
    whole = [frozen for _, frozen in sorted(view.freeze.steps.items()) if frozen.actions][-2:]
    if whole:
        off = view.freeze_section_at(view.step).get("method", "none") == "none"
        yield _sample("freeze_ratio", 0.0 if off else whole[0].actual / whole[0].actions)
    if view.freeze.solved is not None:
        yield _sample("planner_seconds", view.freeze.solved.solve_s, "freeze")


def _ranks(view: JobView) -> Iterator[MetricSample]:
    yield _sample("ranks", len(view.ranks.members) if view.outcome is None else 0)
    yield _sample("spare_ranks", len(view.ranks.spares) if view.outcome is None else 0)
    if _trains(view):
        if (alone := places_without_redundancy(view)) is not None:
            yield _sample("ranks_without_redundancy", len(alone))
        for rank, report in sorted(view.timelines.items()):
            yield _sample("rank_memory_bytes", report.memory_bytes, rank)
        for rank, ratio in sorted(slowdowns(view).items()):
            yield _sample("rank_slowdown_ratio", ratio, rank)
    if view.ranks.checkpoints:
        yield _sample("checkpoint_step", view.ranks.checkpoints[0].step)


def _recoveries(view: JobView) -> Iterator[MetricSample]:
    totals = view.totals
    # Queries look for increases: a counter must be there before it counts for the first time.
    for cause in dict.fromkeys((*CAUSES, *totals.recoveries)):
        yield _sample("recoveries_total", totals.recoveries.get(cause, 0), cause)
        yield _sample("ranks_lost_total", totals.ranks_lost.get(cause, 0), cause)
        for part in PARTS:
            yield _sample(
                "recovery_seconds_total", totals.recovery_s.get(cause, {}).get(part, 0.0), cause, part
            )
    yield _sample("steps_rerun_total", view.steps_rerun)
    for mode in dict.fromkeys((*MODES, *totals.moves)):
        yield _sample("moves_total", totals.moves.get(mode, 0), mode)
        yield _sample("move_seconds_total", totals.move_s.get(mode, 0.0), mode)
    yield _sample("moved_bytes_total", totals.moved_bytes)
    regrouped = [each.regrouped for each in view.recovery.regroupings if each.regrouped is not None]
    if regrouped:
        yield _sample("planner_seconds", regrouped[-1].plan_s, "recovery")


def places_without_redundancy(view: JobView) -> tuple[int, ...] | None:
    """Places whose loss sends the job back to a checkpoint: they own a layer of which no other place has an up-to-date
    copy, or a snapshot. None if the job wants no copies or does not train."""
    plan, elastic = view.followed, view.spec.get("elastic", {})
    if plan is None or view.state != "training" or elastic.get("redundancy") != "peer":
        return None
    if plan.pipeline_count > 1 and plan.shards == 1:  # the other pipelines have every layer
        return ()
    here = view.ranks.copied
    copied = {
        piece for piece, places in plan.kept or plan.copied if any(piece in here.get(at, ()) for at in places)
    }
    return tuple(place for place in range(plan.world_size) if {*plan.pieces_of_place(place)} - copied)


def slowdowns(view: JobView) -> dict[int, float]:
    """Place -> time of its forwards in the newest measured step over the shortest such time in earlier measured steps
    with the same layers and as many forwards: a pipeline also runs the replicas of one that was lost. Forwards,
    because freezing changes the time of backwards. Without places that were not measured before."""
    measured = [ranks for step, ranks in sorted(view.measured.items()) if step > view.measured_since]
    if len(measured) < 2:
        return {}
    *earlier, newest = [{rank: forwards(report) for rank, report in ranks.items()} for ranks in measured]
    ratios = {}
    for rank, (now_s, count) in newest.items():
        before_s = [
            seconds
            for seconds, as_many in (times[rank] for times in earlier if rank in times)
            if seconds > 0 and as_many == count
        ]
        if before_s:
            ratios[rank] = now_s / min(before_s)
    return ratios


def forwards(report: TimelineReport) -> tuple[float, int]:
    """Seconds that a rank's forwards took, and how many there were."""
    lengths = [
        span.end_s - span.start_s
        for span in report.spans
        if Action.parse(span.action).kind is ActionKind.FORWARD
    ]
    return sum(lengths), len(lengths)
