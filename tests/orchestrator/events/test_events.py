"""The event log: every kind of event is read back as it was written, and a torn line harms nothing."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from orchestrator.events import types as events
from orchestrator.events.earlier_names import EARLIER_NAMES
from orchestrator.events.level import Level
from orchestrator.events.listing import listing
from orchestrator.events.log import EventLog, read_log
from orchestrator.events.rehearsed import CopiesSaved, Disturbed, DisturbedSteps, NodeLife, Rehearsed
from orchestrator.events.types import KINDS
from orchestrator.verify.chain import read_chain
from planner.adapt.past import Past
from planner.freezing import FreezeOverrides, FreezePlan, Phases
from planner.plan import Plan
from planner.shards import Piece, Shard
from planner.simulation.slow_links import SlowLink
from workers.protocol import errors, orders, reports

PLAN = Plan(
    epoch=1,
    version=3,
    reason="first",
    layers=((0, 2), (2, 5)),
    stage_ranks=(0, 1),
    schedule="1f1b",
    chunks=1,
    microbatches=4,
    replicas=1,
    recompute=(1,),
)
GENERATION = orders.Generation(
    number=1, epoch=1, members=(0, 1), store_host="10.0.0.1", store_port=4321, timeout_s=30.0
)
STEP = reports.StepReport(
    generation=1,
    step=7,
    loss=2.5,
    grad_norm=1.25,
    lr=0.001,
    samples=16,
    tokens=2048,
    step_s=0.5,
    bubble=0.25,
    skipped=False,
)
OUTCOME = reports.Outcome(rank=1, step=7, stopped=True, layer_digests=((0, "ab"), (1, "cd")))

FREEZE_PLAN = FreezePlan(
    epoch=1,
    version=1,
    ratios=((0.0, 0.5), (1.0, 0.25)),
    weights=((("a", 3_000_000_000), ("b", 7)), ()),
    start=11,
)

EVERY_KIND: tuple[events.Event, ...] = (
    events.Submitted(job="gpt", epoch=1, spec={"job": {"seed": 1}}, resume=False),
    events.Issued(plan=PLAN),
    events.Placing(ranks=(0, 1)),
    events.FlopsCounted(flops_per_sample=1.5e9),
    events.RankStarted(rank=0, node="n0", host="10.0.0.1", pid=123),
    events.Formed(generation=GENERATION, start=orders.CheckpointRef(path="/out/7", step=7), step=7),
    events.Skipped(
        rank=1, damage=errors.DamagedCheckpoint(path="/out/7", file="embed.safetensors", problem="checksum")
    ),
    events.Requested(request="stop"),
    events.Commanded(id="a", name="move", arguments={"layers": "3-4", "rank": 1}, by="control from 10.0.0.9"),
    events.Scaled(ranks=3, spares=1, places=6),
    events.Dismissed(ranks=(7,)),
    events.LayoutWeighed(
        prefix=41, pays=True, reason="with 4 ranks instead of 4 a step takes 60 ms instead of 90 ms"
    ),
    events.FreezeChanged(
        from_step=8,
        method="timelyfreeze",
        r_max=0.5,
        by="control from 127.0.0.1",
        plan=replace(
            FREEZE_PLAN,
            control=FreezeOverrides(
                method="timelyfreeze", r_max=0.5, phases=Phases(warm_up=0, monitoring=4, ramp=6), since=8
            ),
        ),
    ),
    events.FreezeMeasured(
        step=200,
        method="timelyfreeze+prefix",
        kappa=0.81,
        predicted_kappa=0.79,
        p_eff=0.92,
        predicted_p_eff=0.9,
        progress=0.95,
        above_prefix=True,
    ),
    events.Answered(id="a", done=False, step=7, text="the job failed: no room"),
    events.PlannerStarted(life=2, node="n0", pid=124),
    events.FreezeSolved(
        plan=FREEZE_PLAN,
        ratios=((0, 0, 0.5), (1, 3, 1.0)),
        unfrozen_s=0.5,
        solved_s=0.375,
        all_frozen_s=0.25,
        outside_s=0.0625,
        measured_unfrozen_s=0.5625,
        measured_all_frozen_s=0.3125,
        kappa=0.75,
        mean_per_stage=(0.5, 1.0),
        duals=(0.0, 0.125),
        critical=("0F0", "1F0", "1B0"),
        solve_s=0.001,
        spread=1.125,
        energies=(0.25, 4.0),
    ),
    events.Regrouped(
        generation=2,
        cause="loss",
        reason="rank 1 was killed",
        lost=(1,),
        joined=(4,),
        step=7,
        rerun=1,
        steps_lost=0,
        detect_s=0.0625,
        settle_s=0.125,
        plan_s=0.25,
        move_s=0.5,
        resume_s=0.75,
        silent_s=0.03125,
    ),
    events.Migrated(
        version=3,
        layers=(2, 3),
        source=(1, 1),
        target=(0, 0),
        mode="live",
        bytes=1024,
        seconds=0.5,
        steps=4,
        stall_s=0.125,
        step=9,
        shares=(10, 6),
    ),
    events.Paused(reason="no rank is left", step=7),
    events.Sampled(step=7, ranks=(events.Surroundings(rank=1, slowdown=1.5, values=(("cpu_others", 0.5),)),)),
    events.LinksTimed(
        step=7,
        links=(SlowLink(source=0, target=1, latency_s=0.002, bytes_per_s=1.2e7),),
        changes=("the link from rank 0 to rank 1 carries 12 MB/s",),
    ),
    events.LayersTimed(step=7, factors=((1.0, 1.25, 0.8),)),
    events.SpeedsChanged(
        step=7,
        slowdowns=((0, 1.0), (3, 2.5)),
        changes=("rank 3 is 2.50 times slower since step 5 (1.00 -> 2.50)",),
        lasting_steps=200,
        since=5,
        past=Past(
            changed=((0, 2), (3, 5)),
            before=((3, 1.0),),
            slow_steps=((20, 1.9), (31, 2.1)),
            fast_steps=((17, 2.0),),
            slower=True,
            links_changed=4,
            watched=((0, 0.0125, 9), (3, 0.25, 0)),
        ),
    ),
    events.Adapted(step=7, moves=True, reason="it pays", now_s=0.5, then_s=0.3, cost_s=0.1, layers=(4, 2, 4)),
    events.OutOfMemory(
        rank=4,
        place=1,
        plan=(1, 2),
        step=7,
        shortage=errors.MemoryShortage(needed_bytes=10, free_bytes=3, held_bytes=90),
    ),
    events.MemoryLimited(rank=4, limit_bytes=85, reason="plan 1.2 took more than it has", step=7),
    events.Noticed(node="n0", host="10.0.0.1", source="aws", ranks=(1, 2), left_s=120.0),
    events.Undrained(node="n0", host="10.0.0.1", id="u"),
    events.WeightsUnmatched(drawn=("classifier.bias", "classifier.weight"), left_over=("cls.bias",)),
    events.ProfileDoubted(
        key="k", profile_s=1700000000.5, disturbed="", predicted_s=1.02, took_s=0.3, step=25, again=True
    ),
    events.Warned(text="the planner died"),
    events.Stalled(rank=1, seconds=28.5, reason="it waited", action="2F0"),
    events.RankEnded(outcome=OUTCOME),
    events.RankFailed(rank=1, error="killed"),
    events.Finished(step=7, stopped=True, state_sha256="ef"),
    events.Finished(step=7, stopped=False, state_sha256="ef", reached="f1 0.9"),
    events.Finished(step=7, stopped=False, state_sha256="ef", plateau="no better than loss 1 of step 5"),
    events.Failed(reason="rank 1 was killed", user_error=False),
    STEP,
    reports.MemoryLow(
        rank=4, place=1, plan=(1, 2), step=8, left_bytes=100, reserve_bytes=900, seen_s=1700000000.5
    ),
    reports.LayersChecked(rank=1, layers=("a", "b"), whole={"b": "it takes gradients"}, seconds=0.25),
    reports.Rescued(step=7, lost_s=1700000000.5, ends_s=1700000060.5, seconds=0.25, error="disk full"),
    reports.ValidationReport(step=7, loss=2.75),
    reports.ValidationReport(step=8, loss=2.5, metrics={"accuracy": 0.75}),
    reports.CheckpointReport(step=7, path="/out/7", bytes=10, seconds=0.5),
    reports.TimelineReport(
        step=7,
        rank=0,
        step_s=0.5,
        spans=(reports.ActionSpan(action="0F0", start_s=0.0, end_s=0.25),),
        memory_bytes=2**20,
    ),
    reports.SampleReport(step=7, prompt="a", text="b"),
    reports.FreezeStarted(plan=FREEZE_PLAN),
    reports.PrefixFrozen(
        step=8,
        layers=2,
        bound=1.5,
        norms=(0.5, 0.25, 0.125),
        names=("embedding", "block-0"),
        tied=("embedding",),
    ),
    reports.ActivationsKept(step=9, rank=0, layers=2, read_s=0.001, computed_s=0.004),
    reports.ActivationsUsed(step=20, rank=0, layers=2, hits=30, partly=4, misses=6, bytes=4096),
    reports.FreezeReport(
        step=7,
        rank=1,
        actions=(reports.FrozenAction(stage=1, microbatch=0, planned=0.5, actual=0.25, parameters=0.125),),
        passes=4,
        counts=((3, (5, 0)), (4, ())),
    ),
    reports.FrozenCounts(step=7, rank=1, passes=12, counts=((3, "weight", 5),)),
    reports.StandbyReport(
        step=7,
        rank=1,
        layers=(2, 3),
        bytes=1024,
        seconds=0.5,
        shards=(Piece(2, Shard(1, 2)), Piece(3, Shard(0, 2))),
        built=False,
    ),
    reports.CopiedAhead(
        rank=4, epoch=1, change=2, step=7, layers=(2, 3), bytes=1024, seconds=0.5, error="its owner is gone"
    ),
    reports.SwitchReport(
        step=7,
        rank=1,
        epoch=1,
        version=3,
        taken=(2,),
        given=(),
        brought_bytes=1024,
        brought_s=0.5,
        stall_s=0.25,
        switched_s=12.5,
    ),
    reports.FaultReport(rank=1, fault="kill", step=7, phase="commit", fired_s=12.5),
    reports.NoticeReport(rank=1, source="aws", left_s=None, text="rebalance"),
    reports.WarningReport(rank=1, text="nothing answers"),
    Rehearsed(
        trace="made up",
        speedup=10.0,
        grace_s=None,
        began_s=0.5,
        ended_s=64.0,
        lives=(NodeLife(name="n0", node="ab", up_s=0.0, down_s=32.0, noticed_s=16.0),),
        copies=(CopiesSaved(copies=1, losses=2, last_holders=1, steps_lost=8),),
    ),
    Disturbed(by="a neighbour", rank=1, visits=(DisturbedSteps(first=3, last=8),)),
    reports.CurvatureReport(step=7, rank=1, gradient_change_sq=0.5, weight_change_sq=0.25, gradient_sq=1.5),
)


def test_every_kind_of_event_is_tried_here() -> None:
    assert {type(event) for event in EVERY_KIND} == set(KINDS.values())


def test_every_event_has_a_level_and_a_sentence_on_one_line() -> None:
    for event in EVERY_KIND:
        assert events.level_of(event) in get_args(Level), event
        sentence = events.sentence_of(event)
        assert sentence, event
        assert "\n" not in sentence


def test_the_name_in_the_log_is_the_class_s() -> None:
    assert {kind: KINDS[kind].__name__ for kind in KINDS} == {kind: kind for kind in KINDS}
    line = events.Record(time_s=0.0, event=events.Warned(text="a")).to_json()
    assert json.loads(line)["event"] == "Warned"


def test_a_script_of_before_finds_events_by_the_kind_that_it_knows() -> None:
    lines = [json.loads(events.Record(time_s=0.0, event=event).to_json()) for event in EVERY_KIND]
    named = {line["kind"]: line["event"] for line in lines}
    assert named.items() >= EARLIER_NAMES.items()


def test_a_log_of_before_is_read_listed_verified_and_continued(tmp_path: Path) -> None:
    """It was written when events had names beside their classes'; a new writer goes on with those of today."""
    path = tmp_path / "events.jsonl"
    shutil.copy(Path(__file__).parent / "log_of_before.jsonl", path)
    names = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert set(names) == EARLIER_NAMES.keys()
    assert [record.kind for record in read_log(path)] == [EARLIER_NAMES[name] for name in names]
    assert set(EARLIER_NAMES.values()) <= KINDS.keys()

    log = EventLog(path)
    log.append(events.Record(time_s=100.0, event=events.Warned(text="a")))
    log.close()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == [*names, "warned"]
    chain = read_chain([(path.name, path.read_bytes())])
    assert (chain.wrong, len(chain.lines)) == ([], len(names) + 1)

    found = listing(lines, ("Warned",))
    assert found.counts.keys() == set(EARLIER_NAMES.values())
    assert [record.time_s for record in found.records] == [100.0, float(names.index("warned"))]


def test_each_event_comes_back_as_it_went_in(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    records = [events.Record(time_s=float(index), event=event) for index, event in enumerate(EVERY_KIND)]
    for count, record in enumerate(records, 1):
        log.append(record)
        assert len(list(read_log(path))) == count  # flushed at once
    log.close()
    assert list(read_log(path)) == records


def test_numbers_that_are_not_finite_are_valid_json_and_come_back() -> None:
    step = reports.StepReport(
        generation=1,
        step=1,
        loss=math.nan,
        grad_norm=math.inf,
        lr=0.1,
        samples=1,
        tokens=0,
        step_s=1.0,
        bubble=0.0,
        skipped=True,
    )
    line = events.Record(time_s=0.0, event=step).to_json()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    back = events.Record.from_json(line).event
    assert isinstance(back, reports.StepReport)
    assert math.isnan(back.loss)
    assert back.grad_norm == math.inf


def test_a_torn_last_line_is_left_out_and_cut_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = events.Record(time_s=1.0, event=STEP)
    path.write_text(whole.to_json() + "\n" + whole.to_json()[:40])
    assert list(read_log(path)) == [whole]
    log = EventLog(path)
    log.append(whole)
    log.close()
    assert list(read_log(path)) == [whole, whole]


@pytest.mark.parametrize(
    "line", ["not json", '{"time_s": 1, "kind": "party"}', '{"time_s": 1, "kind": "StepReport"}', "{}"]
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(events.Record(time_s=1.0, event=STEP).to_json() + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"events\.jsonl, line 2"):
        list(read_log(path))
