"""Steps computed again: a true run is proved, and an edited number is found though all hashes were made anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resolving import resolve_spec
from tiny_jobs import tiny

from orchestrator.events import types as events
from orchestrator.events.log import EventLog
from orchestrator.events.types import Record
from orchestrator.prepare.model_outline import outline_model
from orchestrator.verify.rerun import choose
from orchestrator.verify.verification import verify_run
from planner.freezing import FreezePlan
from workers.devices.machine import arithmetic
from workers.launch.ranks import LaunchedJob, run_processes
from workers.protocol.orders import Generation
from workers.protocol.reports import CheckpointReport, FreezeStarted, StepReport

STEPS, SAVED = 8, (3, 6, 8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequence[Record]]:
    """The folder of a run of two pipelines of two ranks that freezes, and its log's records."""
    folder = tmp_path_factory.mktemp("trained")
    spec = tiny(
        folder,
        "run",
        job={"steps": STEPS},
        model={"layers": 2, "dropout": 0.1},
        pipeline={"ranks": 4, "replicas": 2, "microbatches": 2},
        freeze={"method": "timelyfreeze", "r_max": 0.8, "warm_up": 1, "monitoring": 3, "ramp": 4},
        checkpoint={"every_steps": 3, "keep": 5},
        elastic={"redundancy": "none"},
    )
    resolved = resolve_spec(spec, outline_model(spec), {"CPU": 4.0}, epoch=1)
    ratios = tuple((0.5, 0.25) for _ in resolved.outline.layers)
    frozen = FreezePlan(epoch=1, version=1, ratios=ratios, start=4)
    run = run_processes(
        LaunchedJob(
            config=resolved.config, plan=resolved.plan, schedule=resolved.schedule, freeze_plans=(frozen,)
        )
    )
    members = tuple(range(4))
    generation = Generation(
        number=1, epoch=1, members=members, store_host="127.0.0.1", store_port=1, timeout_s=60.0
    )
    machine = arithmetic("cpu")
    happened: list[events.Event] = [
        events.Submitted(job="run", epoch=1, spec=resolved.spec.model_dump(mode="json"), resume=False),
        events.Issued(plan=resolved.plan),
        *(events.RankStarted(rank=rank, node="n", host="h", pid=1, machine=machine) for rank in members),
        events.Formed(generation=generation, start=None, step=0),
        FreezeStarted(plan=frozen),
        *(report for report in run.reports if isinstance(report, StepReport | CheckpointReport)),
        *(events.RankEnded(outcome=outcome) for outcome in run.outcomes),
        events.Finished(step=STEPS, stopped=False, state_sha256=run.state_sha256),
    ]
    return folder / "run", [
        Record(time_s=float(second), event=event) for second, event in enumerate(happened)
    ]


def verified(folder: Path, records: Sequence[Record], steps: int) -> Any:
    """The ledger of a log of `records`, whose hashes fit together whatever was edited."""
    (folder / "events.jsonl").unlink(missing_ok=True)
    log = EventLog(folder / "events.jsonl")
    for record in records:
        log.append(record)
    log.close()
    ledger, _ = verify_run(str(folder), rerun=steps)
    return ledger


def edited(records: Sequence[Record], step: int, **fields: Any) -> list[Record]:
    return [
        replace(record, event=replace(record.event, **fields))
        if isinstance(record.event, StepReport) and record.event.step == step
        else record
        for record in records
    ]


def test_a_true_run_is_proved_on_one_rank(trained: tuple[Path, Sequence[Record]]) -> None:
    ledger = verified(*trained, STEPS)
    assert ledger.wrong == []
    (unproved,) = ledger.unproved
    assert "no checkpoint and no snapshot names one of them" in unproved
    assert "8 steps computed again with the same losses, norms and bits" in ledger.claims
    (fact,) = [fact for fact in ledger.facts if fact.startswith("computed again")]
    assert fact == (
        "computed again: steps 1 to 3 from the initial weights, to the checkpoint of step 3; steps 4 to 6 from the"
        " checkpoint of step 3, to the checkpoint of step 6; steps 7 to 8 from the checkpoint of step 6, to the"
        " checkpoint of step 8, to the end"
    )


def test_an_edited_number_is_found_by_computing_its_step_again(
    trained: tuple[Path, Sequence[Record]],
) -> None:
    folder, records = trained
    true = next(r.event for r in records if isinstance(r.event, StepReport) and r.event.step == 4)
    forged = edited(records, 4, loss=true.loss * (1 + 2**-40))
    assert verified(folder, forged, 0).wrong == []
    ledger = verified(folder, forged, 3)
    assert ledger.wrong == [
        f"step 4: loss {true.loss * (1 + 2**-40)!r} is logged and {true.loss!r} is computed again, from the checkpoint"
        " of step 3"
    ]
    assert "the other 5 of 8 steps compute what the log says" in " ".join(ledger.assumed)
    # Without the freeze decision its steps have other gradients; the norm is that of the gradient before clipping.
    unfrozen = [record for record in records if not isinstance(record.event, FreezeStarted)]
    at_4, at_7 = verified(folder, unfrozen, 3).wrong
    assert at_4.startswith("step 4: grad_norm")
    assert at_7.startswith("step 7: grad_norm")


def test_other_machines_and_missing_data_are_told_and_not_called_wrong(
    trained: tuple[Path, Sequence[Record]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, records = trained
    norm = next(r.event.grad_norm for r in records if isinstance(r.event, StepReport) and r.event.step == 7)
    elsewhere = [
        replace(record, event=replace(record.event, machine="another CPU"))
        if isinstance(record.event, events.RankStarted)
        else record
        for record in edited(records, 7, grad_norm=norm * (1 + 2**-30))
    ]
    (wrong,) = verified(folder, edited(elsewhere, 7, grad_norm=2 * norm), 1).wrong
    assert wrong.startswith("step 7: grad_norm")
    ledger = verified(folder, elsewhere, 1)
    assert ledger.wrong == []
    assert "which another machine (another CPU in the log" in " ".join(ledger.unproved)
    text = folder.parent / "text.txt"
    moved = text.rename(text.with_suffix(".moved"))
    try:
        ledger = verified(folder, records, 1)
    finally:
        moved.rename(text)
    assert ledger.wrong == []
    assert "step 7 from the checkpoint of step 6: they cannot be computed again" in " ".join(ledger.unproved)
    on_gpus = json.loads(json.dumps(records[0].event.spec))  # type: ignore[union-attr]
    on_gpus["cluster"]["device"] = "cuda"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    gpus = [replace(records[0], event=replace(records[0].event, spec=on_gpus)), *records[1:]]
    assert "GPUs computed them, and this machine has none" in " ".join(verified(folder, gpus, 1).unproved)


def test_steps_are_shared_out_evenly_and_the_rest_goes_to_the_newest() -> None:
    assert choose([10, 10, 10], 5) == (1, 2, 2)
    assert choose([10, 1, 10], 12) == (5, 1, 6)
    assert choose([3, 3, 2], 100) == (3, 3, 2)
    assert choose([10, 0], 4) == (4, 0)
    assert choose([], 4) == ()
    assert choose([2_000_000, 1_000_000], 1_500_001) == (750_000, 750_001)
