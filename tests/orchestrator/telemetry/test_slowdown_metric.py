"""How much slower each rank computes than before."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from synthetic_run import RANKS, plan, timelines

from orchestrator.events.types import Event, Issued, Record
from orchestrator.history.job_view import JobView
from orchestrator.telemetry.samples import slowdowns

PIPELINES = replace(plan(), replicas=2)


def take(view: JobView, *logged: Event) -> None:
    for event in logged:
        view.fold(Record(time_s=0.0, event=event))


def test_a_rank_that_also_runs_a_lost_pipeline_s_replica_is_not_slow() -> None:
    random, view = Random(1), JobView()
    take(view, Issued(plan=PIPELINES), *timelines(1, random), *timelines(2, random))
    same = pytest.approx(dict.fromkeys(range(RANKS), 1.0), rel=0.2)
    assert slowdowns(view) == same
    # Each rank now runs both replicas' microbatches, one after the other.
    take(view, Issued(plan=replace(PIPELINES, version=2, pipelines=1)), *timelines(3, random, windows=2))
    assert slowdowns(view) == {}, "no earlier step had as many forwards"
    take(view, *timelines(4, random, windows=2))
    assert slowdowns(view) == same
