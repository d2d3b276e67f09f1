"""Losses and joins on the page: the rehearsal's figures, its curves, and a row for each change."""

from __future__ import annotations

from dataclasses import replace

from elastic_run import ElasticRun, eventful, life, rehearse
from report_page import Page
from synthetic_run import records

from orchestrator.events.rehearsed import CopiesSaved
from orchestrator.events.types import Migrated, Record, Stalled
from orchestrator.history.job_view import fold
from orchestrator.report.page import render


def page(run: ElasticRun) -> Page:
    return Page(render(fold(run.records)))


def test_a_rehearsal_shows_its_ratio_its_nodes_and_what_each_change_cost() -> None:
    run = eventful()
    lives = (life(0, 990, 1012.9), life(1, 990, 1012.9), life(2, 990, 1004.5), life(3, 990), life(4, 1007))
    saved = CopiesSaved(copies=2, losses=3, last_holders=1, steps_lost=6)
    rehearse(run, lives, began_s=1001, ended_s=1022.4, copies=(saved,))
    shown = page(run)
    # 28 of 64.1 node-seconds, see test_effective_time.py.
    assert "Effective training time ratio0.437" in shown.text
    assert "0.944 at speed 1, emulated" in shown.text
    assert "t.csv, 10 times as fast" in shown.text
    assert "Nodes lost31 joined" in shown.text
    titles = [attributes.get("aria-label") for attributes in shown.all("div")]
    assert "Node-seconds" in titles
    assert "Changes of nodes" in titles
    assert (
        "Up-to-date copies of every layer: what the 3 losses of the whole trace would cost with them"
        in titles
    )
    assert "−slot2" in shown.text
    assert "+slot4" in shown.text
    assert "−slot0, −slot1" in shown.text
    assert "live: 4.00 at second 0" in shown.text
    assert "lowest 0 at second 3" in shown.text


def test_a_job_that_lost_ranks_shows_its_recoveries() -> None:
    text = page(eventful()).text
    assert "Recoveries" in text
    assert "Changes of ranks33 ranks failed or drained" in text
    assert "−rank 0, −rank 1" in text
    assert "Rehearsal" not in text


def test_ranks_that_stood_still_have_a_row_each() -> None:
    run = eventful()
    run.put(Stalled(rank=1, seconds=28.0, reason="its process was stopped"))
    run.put(Stalled(rank=2, seconds=2.0, action="1F0"))
    text = page(run).text
    assert "Stood still30.0s2 standstills, all ranks together" in text
    assert "128.0 sits process was stopped" in text
    assert "22.00 sit computed 1F0" in text
    alone = fold([*records(), Record(time_s=records()[-1].time_s, event=Stalled(rank=1, seconds=4.0))])
    assert "Stood still4.00s" in Page(render(alone)).text


def test_layers_that_moved_have_a_row_each() -> None:
    live = Migrated(
        version=2,
        layers=(3, 4),
        source=(1, 1),
        target=(2, 2),
        mode="live",
        bytes=5_300_000,
        seconds=0.8,
        steps=3,
        stall_s=0.036,
        step=12,
    )
    shared = replace(live, layers=(), source=(), target=(), shares=(10, 6))
    even = replace(shared, shares=())
    stop = replace(live, layers=(2, 5), source=(0, 2), target=(1, 1), mode="stop", bytes=None, step=20)
    run = records()
    moved = [Record(time_s=run[-1].time_s, event=event) for event in (live, stop, shared, even)]
    text = Page(render(fold([*run, *moved]))).text
    assert "Layers that moved" in text
    assert "10 + 6 microbatches in its pipelines" in text
    assert "even shares" in text
    assert "123, 4: place 1 → 2live5.30 MB800 ms336.0 ms" in text
    assert "202: place 0 → 1; 5: place 2 → 1stop–" in text


def test_a_job_whose_ranks_stayed_shows_nothing_of_it() -> None:
    text = Page(render(fold(records()))).text
    assert "Recoveries" not in text
    assert "Rehearsal" not in text
    assert "Layers that moved" not in text
