"""The ledger: it proves a sound log, and names the numbers that are wrong in each kind of unsound one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from elastic_run import BATCHES, SPEC, TRAIN_SAMPLES, ElasticRun, eventful
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from orchestrator.cli.exit_codes import PROVED_IN_PART
from orchestrator.cli.main import app
from orchestrator.events.log import EventLog
from orchestrator.events.types import Finished, Formed, Record, Regrouped, Submitted
from orchestrator.verify.ledger import Ledger, audit
from orchestrator.verify.verification import report, verify_run
from workers.data.buckets import Buckets
from workers.data.sampling import samples_at
from workers.protocol.errors import JobError
from workers.protocol.reports import CheckpointReport, LayersChecked, PrefixFrozen, StepReport


def wrong(records: list[Record]) -> list[str]:
    return audit(records, TRAIN_SAMPLES).wrong


def changed(index: int, **fields: Any) -> list[Record]:
    """The eventful log with some fields changed in its step report number `index`."""
    records = eventful().records
    places = [place for place, record in enumerate(records) if isinstance(record.event, StepReport)]
    event = records[places[index]].event
    assert isinstance(event, StepReport)
    records[places[index]] = replace(records[places[index]], event=replace(event, **fields))
    return records


@st.composite
def histories(draw: st.DrawFn) -> ElasticRun:
    """A sound job with any sequence of losses, joins, checkpoints and returns to them."""
    growing = draw(st.dictionaries(st.integers(2, 12), st.integers(2, 4), max_size=2))
    run = ElasticRun(growth=growing)
    run.submit()
    run.form((0, 1, 2, 3))
    for rank in range(4, 4 + draw(st.integers(0, 6))):
        run.train(draw(st.integers(0, 4)))
        if draw(st.booleans()):
            run.save()
        what = draw(st.sampled_from(("loss", "join", "return", "resume")))
        if what == "join":
            run.rank(rank)
            run.regroup((*run.members, rank), cause="join", joined=(rank,))
        elif what == "resume":
            run.submit(epoch=run.epoch + 1, resume=True)
            run.form(run.members, from_checkpoint=True)
        else:
            lost = run.members[0]
            run.lose(lost)
            run.regroup((*run.members[1:], rank), lost=(lost,), from_checkpoint=what == "return")
    run.train(draw(st.integers(1, 5)))
    run.finish()
    return run


@given(histories())
def test_a_sound_job_is_proved_whatever_it_lost(run: ElasticRun) -> None:
    ledger = audit(run.records, TRAIN_SAMPLES)
    assert ledger.wrong == ledger.unproved == []
    assert ledger.steps == ledger.proved_samples == run.step
    assert ledger.generations == run.generation


@given(histories(), st.data())
def test_a_report_that_is_lost_or_doubled_is_noticed(run: ElasticRun, data: st.DataObject) -> None:
    ledger = audit(run.records, TRAIN_SAMPLES)
    # Only reports that stand count; those that a return to a checkpoint voids may well be lost.
    victim = data.draw(st.sampled_from([each for each in ledger.standing if each is not None]))
    place = next(place for place, record in enumerate(run.records) if record.event is victim)
    without = [*run.records[:place], *run.records[place + 1 :]]
    assert audit(without, TRAIN_SAMPLES).wrong
    doubled = [*run.records[: place + 1], run.records[place], *run.records[place + 1 :]]
    assert f"step {victim.step} was committed twice" in audit(doubled, TRAIN_SAMPLES).wrong[0]


def test_a_return_to_a_checkpoint_voids_what_came_after() -> None:
    ledger = audit(eventful().records, TRAIN_SAMPLES)
    assert (ledger.steps, ledger.superseded, ledger.generations, ledger.epochs) == (12, 6, 4, 1)
    assert [report.generation for report in ledger.standing if report is not None] == [1] * 4 + [4] * 8
    assert [checkpoint.step for checkpoint in ledger.checkpoints] == [4, 12]


def test_a_return_to_a_checkpoint_may_take_more_than_one_generation() -> None:
    run = ElasticRun()
    run.submit()
    run.form((0, 1, 2, 3))
    run.train(4)
    run.save()
    run.train(5)
    run.lose(0)
    run.form((1, 2, 3), from_checkpoint=True)
    # Another rank is lost before that generation trains.
    run.lose(1)
    run.step = 9
    run.regroup((2, 3), lost=(0, 1), from_checkpoint=True)
    run.train(2)
    run.lose(2)
    run.regroup((3,), lost=(2,))
    run.finish()
    ledger = audit(run.records, TRAIN_SAMPLES)
    assert ledger.wrong == []
    assert (ledger.steps, ledger.superseded) == (6, 5)


def test_a_step_with_another_steps_samples_is_told() -> None:
    assert wrong(changed(0, samples_digest=BATCHES.digest(3, TRAIN_SAMPLES))) == [
        "step 1 did not use the samples at positions 0 to 11 of the data's order, but those of step 3"
    ]
    # The last report stands: step 12, positions 132 to 143.
    assert wrong(changed(-1, samples_digest="0" * 64)) == [
        "step 12 did not use the samples at positions 132 to 143 of the data's order"
    ]
    assert wrong(changed(-1, samples=11)) == ["step 12 used 11 samples, where a step has 12"]


def grown() -> ElasticRun:
    """Six steps, of which the last three take twice as many samples."""
    run = ElasticRun(growth={4: 2})
    run.submit()
    run.form((0, 1, 2, 3))
    run.train(6)
    return run


def test_the_samples_of_a_batch_that_grows_are_proved() -> None:
    records = grown().records
    ledger = audit(records, TRAIN_SAMPLES)
    assert (ledger.wrong, ledger.proved_samples) == ([], 6)
    (place,) = [place for place, record in enumerate(records) if isinstance(record.event, PrefixFrozen)]
    untold = wrong([*records[:place], *records[place + 1 :]])
    assert untold[0] == "step 4 used 24 samples, where a step has 12"
    leg = records[place].event.leg
    odd = replace(records[place].event, leg=replace(leg, sample=leg.sample + 1))
    told = wrong([*records[:place], replace(records[place], event=odd), *records[place + 1 :]])
    assert "the leg of step 4 begins at sample 37, after the one of step 1 that takes 12 samples" in told[0]


def test_a_job_whose_batch_has_grown_ends_with_the_samples_of_its_steps() -> None:
    run = grown()
    spec = {**SPEC, "job": {**SPEC["job"], "steps": 9}}
    run.records[0] = replace(run.records[0], event=replace(run.records[0].event, spec=spec))
    for step, said in ((6, ""), (5, "the job finished at step 5 of 6 though nobody stopped it")):
        records = [
            record
            for record in run.records
            if not (isinstance(record.event, StepReport) and record.event.step > step)
        ]
        end = Finished(step=step, stopped=False, state_sha256=None)
        assert wrong([*records, Record(time_s=9999.0, event=end)]) == ([said] if said else [])


def test_steps_use_every_position_once() -> None:
    used = [
        index
        for step in range(5)
        for microbatch in range(6)
        for index in samples_at(5, BATCHES.course.positions(step + 1, microbatch), 60)
    ]
    assert sorted(used) == list(range(60))


def test_old_logs_are_not_proved() -> None:
    records = eventful().records
    old = [
        replace(record, event=replace(record.event, samples_digest=""))
        if isinstance(record.event, StepReport)
        else record
        for record in records
    ]
    ledger = audit(old, TRAIN_SAMPLES)
    assert ledger.wrong == []
    assert ledger.unproved == ["which samples 12 of 12 steps used: their reports do not say"]
    assert "no sample" not in report(ledger, checkpoints=1)[-1]


def test_it_says_which_layers_were_compared_with_plain_autograd() -> None:
    records = eventful().records
    assert "taken for granted: layers train as in plain autograd" in "\n".join(
        report(audit(records, TRAIN_SAMPLES), checkpoints=1)
    )
    compared = [
        LayersChecked(rank=0, layers=("a", "b"), whole={}, seconds=0.1),
        LayersChecked(
            rank=1, layers=("b", "c"), whole={"c": "it takes gradients in its forward pass"}, seconds=0.1
        ),
    ]
    records += [Record(time_s=records[-1].time_s, event=event) for event in compared]
    told = report(audit(records, TRAIN_SAMPLES), checkpoints=1)
    assert "3 layers compared with plain autograd before they trained; 1 layer left to it" in told
    assert not [line for line in told if "layers train as in" in line]


def edit(kind: type, change: Callable[[Any], Any], number: int = -1) -> list[Record]:
    """The eventful log with one event of `kind` changed."""
    records = eventful().records
    places = [place for place, record in enumerate(records) if isinstance(record.event, kind)]
    place = places[number]
    records[place] = replace(records[place], event=change(records[place].event))
    return records


def test_a_job_that_reached_its_goal_ends_before_its_last_step() -> None:
    reached = edit(Finished, lambda e: replace(e, stopped=False, reached="accuracy 0.98"))
    assert not audit(reached, TRAIN_SAMPLES).wrong
    plateau = edit(Finished, lambda e: replace(e, stopped=False, plateau="no better than loss 1 of step 3"))
    assert not audit(plateau, TRAIN_SAMPLES).wrong


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (edit(Finished, lambda e: replace(e, step=11)), "finished at step 11, but the log has 12 steps"),
        (edit(Finished, lambda e: replace(e, stopped=False)), "at step 12 of 1000 though nobody stopped it"),
        (edit(Finished, lambda e: replace(e, state_sha256="f" * 64)), "ended with state_sha256"),
        (
            edit(Formed, lambda e: replace(e, generation=replace(e.generation, number=2))),
            "generation 2 was formed after generation 3",
        ),
        (
            edit(Formed, lambda e: replace(e, generation=replace(e.generation, epoch=2))),
            "generation 4 was formed by controller epoch 2 during epoch 1",
        ),
        (
            edit(Formed, lambda e: replace(e, start=None)),
            "without a checkpoint or a snapshot, but 6 later steps, up to 10",
        ),
        (
            edit(Regrouped, lambda e: replace(e, steps_lost=2)),
            "says that 2 committed steps were lost; the log shows 6",
        ),
        (edit(Regrouped, lambda e: replace(e, rerun=2), 0), "generation 2 ran 2 steps in flight again"),
        (
            edit(Regrouped, lambda e: replace(e, generation=9)),
            "generation 9 trained, but the log does not say",
        ),
        (edit(Regrouped, lambda e: replace(e, step=3)), "was formed at step 4 and trained from 3"),
        (
            [
                *eventful().records,
                replace(eventful().records[0], event=Submitted(job="e", epoch=1, spec=SPEC, resume=True)),
            ],
            "controller epoch 1 came after epoch 1",
        ),
        (changed(5, generation=9), "step 6 was committed by generation 9, which was not formed"),
        (
            changed(5, generation=1),
            "step 6 of generation 1 was announced after generation 2 had begun at step 4",
        ),
    ],
)
def test_what_is_wrong_is_told_by_number(records: list[Record], said: str) -> None:
    assert any(said in text for text in wrong(records)), wrong(records)


def test_a_log_without_an_end_or_a_beginning_says_so() -> None:
    records = eventful().records
    assert audit(records[:-1], TRAIN_SAMPLES).unproved[0].startswith("how the job ends")
    run = ElasticRun()
    run.submit(resume=True)
    run.checkpoint = 4
    run.form((0, 1), from_checkpoint=True)
    run.train(2)
    run.finish()
    ledger = audit(run.records, TRAIN_SAMPLES)
    assert ledger.wrong == []
    assert ledger.unproved == ["steps 1 to 4 are not in this log"]
    assert ledger.steps == 6


def written(folder: Path, records: list[Record]) -> str:
    log = EventLog(folder / "events.jsonl")
    for record in records:
        log.append(record)
    log.close()
    return str(folder)


@pytest.mark.parametrize("growth", [{}, {4: 2}])
def test_the_samples_of_fixed_parts_are_proved_by_the_folder_alone(
    tmp_path: Path, growth: dict[int, int]
) -> None:
    """`data.buckets = 2`: each of the two replicas draws from its half, also once the batch has grown."""
    run = ElasticRun(growth=growth)
    run.submit()
    run.form((0, 1, 2, 3))
    run.train(6)
    run.finish()
    spec = {**SPEC, "data": {**SPEC["data"], "buckets": 2}}
    run.records[0] = replace(run.records[0], event=replace(run.records[0].event, spec=spec))
    parts = Buckets(TRAIN_SAMPLES, 2, run.batches.course)

    def drawn(record: Record) -> Record:
        step = record.event.step if isinstance(record.event, StepReport) else 0
        digest = run.batches.digest(step, parts) if step else ""
        return replace(record, event=replace(record.event, samples_digest=digest)) if step else record

    ledger, _ = verify_run(written(tmp_path / "parts", [*map(drawn, run.records)]))
    assert (ledger.wrong, ledger.steps, ledger.proved_samples) == ([], 6, 6)
    # The same positions of one order of all samples are others.
    ledger, _ = verify_run(written(tmp_path / "whole", run.records))
    assert "step 1 did not use the samples at positions 0 to 11" in ledger.wrong[0]


def test_the_command_says_what_is_wrong_and_fails(tmp_path: Path) -> None:
    # Whether its lines are as they were written is tried in test_chain.py.
    unsaved = [record for record in eventful().records if not isinstance(record.event, CheckpointReport)]
    sound = CliRunner().invoke(app, ["verify", written(tmp_path / "sound", unsaved)])
    assert sound.exit_code == PROVED_IN_PART
    assert "12 steps in 4 generations of 1 controller; 6 committed steps run again" in sound.stdout
    # The log's checkpoint was never written.
    ledger, _ = verify_run(written(tmp_path / "again", eventful().records))
    assert "was reported whole and is gone" in ledger.wrong[0]
    broken = CliRunner().invoke(app, ["verify", written(tmp_path / "broken", changed(-1, step=13))])
    assert broken.exit_code == 1
    assert "WRONG: step 12 missing: step 13 came after step 11" in broken.stdout


def test_a_folder_without_a_run_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no folder"):
        verify_run(str(tmp_path / "none"))
    with pytest.raises(JobError, match="holds no event log"):
        verify_run(str(tmp_path))
    (tmp_path / "events.jsonl").write_text("no event\n")
    with pytest.raises(JobError, match="line 1, is no event"):
        verify_run(str(tmp_path))


def test_an_empty_ledger_claims_no_samples() -> None:
    assert report(Ledger(), 0)[-1] == "proved: no step missing or doubled"
