"""Complete jobs on plain processes whose pipelines shrink and multiply as layers freeze: the bits stay the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_profile import made_profile
from process_hosts import ElasticJob, Ran, assert_gone
from ray_jobs import resolved
from test_freeze_control import ControlledJob
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from orchestrator.controller.planning import precomputed_plans
from orchestrator.events import types as events
from orchestrator.events.log import EventLog
from orchestrator.history.job_view import JobView, fold
from orchestrator.lifecycle.states import JobFinished
from orchestrator.prepare.replay import recorded
from orchestrator.prepare.settling import Settled
from orchestrator.report.page import render
from orchestrator.report.run.layouts import stretches
from orchestrator.verify.ledger import audit
from planner.plan import Plan
from planner.profile import Profile
from planner.schedule.expand import schedule_of
from planner.simulation.predict import predict
from workers.activation_cache.cache_folders import CacheFolders
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import ActivationsKept, ActivationsUsed, FreezeStarted, PrefixFrozen, StepReport

STEPS = 18
PASS_S = 0.002
LAYERS = 8
SCHEDULE = [[3, 4], [8, 6]]
Act = Callable[[ElasticJob, events.Event], None]
EXPECTED: dict[str, str] = {}
"""What is trained and how -> the state in which it ends."""


def packing(folder: Path, pass_s: float = PASS_S, **sections: dict[str, Any]) -> Settled:
    """One pipeline of four ranks for four replicas."""
    times = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), pass_s)
    given: dict[str, dict[str, Any]] = {
        "job": {"steps": STEPS, "sample_tokens": 0},
        "model": {"layers": LAYERS - 2},
        "pipeline": {"ranks": 4, "replicas": 4, "pipelines": 1, "microbatches": 1},
        "cluster": {"device": "emulated", "emulated": times},
        "freeze": {"method": "prefix", "schedule": SCHEDULE},
        "elastic": {"redundancy": "peer"},
    }
    for section, keys in sections.items():
        given[section] = {**given.get(section, {}), **keys}
    return resolved(tiny(folder, "job", **given))


def profile_of(done: Settled) -> Profile:
    outline = done.outline
    weights = [PASS_S / 0.01] * len(outline.layers)
    return made_profile(outline.layers, outline.parameters, 4, weights=weights)


def run(
    done: Settled,
    act: Act = lambda job, event: None,
    *,
    back: bool = False,
    steps: int | None = None,
    profile: Profile | None = None,
) -> Ran:
    """Run the job to its end.

    Args:
        steps: its last one; None: as the spec says.
        back: it may go back to an earlier step, once.
        profile: to plan by; None: `profile_of`.
    """
    ran = ElasticJob(done, act, profile=profile or profile_of(done), packs=True).run()
    assert isinstance(ran.state, JobFinished), ran.state
    again = [step for step, before in zip(ran.steps[1:], ran.steps, strict=False) if step != before + 1]
    assert ran.steps[-1] == (steps or done.config.job.steps)
    assert len(again) <= back
    assert_gone(ran.pids)
    return ran


def expected(folder: Path, **sections: dict[str, Any]) -> str:
    """The state in which the job ends without packing and copies, on two threads."""
    training = {key: keys for key, keys in sections.items() if key not in ("elastic", "checkpoint")}
    pipeline = {**training.pop("pipeline", {}), "ranks": 2}
    key = json.dumps([training, pipeline], sort_keys=True)
    if key not in EXPECTED:
        done = packing(folder, 0.0, pipeline=pipeline, **training)
        EXPECTED[key] = run_threads(LaunchedJob(done.config, done.plan, done.schedule)).state_sha256
    return EXPECTED[key]


def packed(ran: Ran) -> list[events.Regrouped]:
    return [event for event in ran.of(events.Regrouped) if event.cause == "pack"]


def layouts(ran: Ran) -> list[tuple[int, int]]:
    """(pipelines, ranks of each) of the plans, in order."""
    found = [(event.plan.pipeline_count, event.plan.pipeline_ranks) for event in ran.of(events.Issued)]
    return [layout for number, layout in enumerate(found) if not number or layout != found[number - 1]]


def records(done: Settled, ran: Ran) -> list[events.Record]:
    spec = done.spec.model_dump(mode="json")
    begun = events.Submitted(job="job", epoch=1, spec=spec, resume=False, takeover=False)
    return [
        events.Record(time_s=float(number), event=event) for number, event in enumerate((begun, *ran.log))
    ]


@pytest.fixture(autouse=True)
def _worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs are too short for a regroup of seconds to pay."""
    monkeypatch.setattr(precomputed_plans, "FIRST_REGROUP_S", 0.0)


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "shards": {"pipeline": {"shard": "optimizer"}},
    "snapshots": {"elastic": {"copy_every": 3}},
    "checkpoints": {"elastic": {"redundancy": "checkpoint"}, "checkpoint": {"every_steps": 2}},
    "bfloat16": {"job": {"precision": "bfloat16"}},
    "stop": {"elastic": {"migration": "stop"}},
    "bfloat16, stop": {"job": {"precision": "bfloat16"}, "elastic": {"migration": "stop"}},
    "thawed": {"freeze": {"schedule": [[3, 6], [14, 0]]}},
    "tied, host copies": {"model": {"tied_embeddings": True}, "elastic": {"copies_in": "host"}},
}


KEPT_OTHERWISE = ("shards", "snapshots", "checkpoints", "bfloat16", "stop")
"""Cases that jobs whose batch grows, or others here, have too."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.soak] if case in KEPT_OTHERWISE else []) for case in CASES],
)
def test_pipelines_shrink_and_multiply_with_the_same_bits(tmp_path: Path, case: str) -> None:
    done = packing(tmp_path / "packed", **CASES[case])
    ran = run(done)
    assert packed(ran), "no layout was changed"
    assert len(layouts(ran)) > 1
    assert max(pipelines for pipelines, _ in layouts(ran)) > 1
    assert len(ran.pids) == 4, "no process was started anew"
    assert ran.state_sha256 == expected(tmp_path / "plain", **CASES[case])
    if case == "plain":
        assert_report_shows_pipelines_over_the_steps_and_what_each_change_cost(done, ran)


@pytest.mark.parametrize("pack", [pytest.param("planner", marks=pytest.mark.soak), "paper"])
def test_the_rule_of_pipetransformer_has_the_layout_follow(tmp_path: Path, pack: str) -> None:
    rule = {"method": "pipetransformer", "schedule": [], "alpha": 0.6, "check_every": 3, "pack": pack}
    done = packing(tmp_path / "packed", freeze=rule)
    profile = profile_of(done)
    # Activations take most of the memory, and frozen layers keep none: so shorter pipelines soon take no more.
    layers = tuple(replace(layer, activation_bytes=10**7) for layer in profile.model.layers)
    profile = replace(profile, model=replace(profile.model, layers=layers))
    peak = max(predict(profile, done.plan, done.schedule).memory.peak_bytes)
    done = replace(done, plan=replace(done.plan, predicted_peak_memory_bytes=peak))
    ran = run(done, profile=profile)
    frozen = [event.layers for event in ran.of(PrefixFrozen)]
    assert frozen == sorted(frozen)
    assert frozen[-1] >= LAYERS // 2
    assert packed(ran), "no layout was changed"
    counts = [pipelines for pipelines, _ in layouts(ran)]
    assert max(counts) > 1
    if pack == "paper":
        assert all(pipelines * ranks == 4 and ranks in (4, 2, 1) for pipelines, ranks in layouts(ran))
    assert ran.state_sha256 == expected(tmp_path / "plain", freeze={**rule, "pack": "off"})


def assert_report_shows_pipelines_over_the_steps_and_what_each_change_cost(done: Settled, ran: Ran) -> None:
    view = fold(records(done, ran))
    found = stretches(view)
    assert (found[0].first, found[0].frozen, found[0].pipelines, found[0].ranks) == (1, 0, 1, 4)
    assert [each.first for each in found if each.frozen] != []
    assert found[-1].frozen == SCHEDULE[-1][1]
    changed = [each for each in found if each.cost_s is not None]
    assert len(changed) == len(ran.of(events.Regrouped))
    assert all(each.cost_s is not None and 0 < each.cost_s < 60 for each in changed)
    page = render(view)
    assert "Pipelines and frozen layers over the steps" in page
    assert f"{found[-1].pipelines} x " in page


def first(kind: type[Any], then: Act, when: Callable[[Any], bool] = lambda event: True) -> Act:
    """`then` at the first event of a kind."""
    left = [True]

    def act(running: ElasticJob, event: events.Event) -> None:
        if left and isinstance(event, kind) and when(event):
            left.pop()
            then(running, event)

    return act


def kill(rank: int) -> Act:
    return lambda running, event: running.signal(rank)


PHASES: dict[str, Callable[[], Act]] = {
    "freezing": lambda: first(PrefixFrozen, kill(1)),
    "copying": lambda: first(
        events.Issued, kill(1), lambda event: event.plan.reason.startswith("copies for the next")
    ),
    "regrouping": lambda: first(
        events.Issued, kill(1), lambda event: event.plan.pipeline_count > 1 and event.plan.version > 1
    ),
    "formed": lambda: first(events.Regrouped, kill(1), lambda event: event.cause == "pack"),
    "first step": lambda: first(StepReport, kill(1), lambda event: event.generation > 1),
    "second freezing": lambda: first(PrefixFrozen, kill(2), lambda event: event.layers == 6),
}


@pytest.mark.parametrize(
    "phase",
    [
        # In jobs whose batch grows ranks are killed in these phases too.
        pytest.param(
            phase,
            marks=[pytest.mark.soak] if phase not in ("copying", "regrouping") else [],
        )
        for phase in PHASES
    ],
)
def test_a_rank_killed_in_any_phase_of_packing_changes_no_bit(tmp_path: Path, phase: str) -> None:
    ran = run(packing(tmp_path / "packed"), PHASES[phase]())
    lost = [event for event in ran.of(events.Regrouped) if event.lost]
    assert lost, "no rank was lost"
    assert sum(event.steps_lost for event in lost) == 0
    assert ran.state_sha256 == expected(tmp_path / "plain")


def short_epochs(folder: Path) -> dict[str, dict[str, Any]]:
    """Four steps are an epoch."""
    folder.mkdir(exist_ok=True)
    text = folder / "short.txt"
    text.write_text("".join(f"{number} sheep jump\n" for number in range(200))[: int(33 * 16 / 0.9)])
    return {"job": {"steps": 24}, "data": {"path": str(text)}}


@pytest.mark.parametrize(
    "phase", [*(pytest.param(phase, marks=pytest.mark.soak) for phase in ("quiet", "filling")), "found"]
)
def test_what_frozen_layers_make_is_kept_while_pipelines_multiply_and_ranks_die(
    tmp_path: Path, phase: str
) -> None:
    acts = {
        "quiet": lambda running, event: None,
        "filling": first(ActivationsKept, kill(0)),
        "found": first(ActivationsUsed, kill(0), lambda event: event.hits + event.partly > 0),
    }
    short = short_epochs(tmp_path / "text")
    ran = run(packing(tmp_path / "packed", **short), acts[phase])
    assert bool([event for event in ran.of(events.Regrouped) if event.lost]) == (phase != "quiet")
    assert max(pipelines for pipelines, _ in layouts(ran)) > 1
    assert {event.why_not for event in ran.of(ActivationsKept)} == {""}
    assert sum(event.hits for event in ran.of(ActivationsUsed)) > 10
    short["freeze"] = {"cache": "off"}
    assert ran.state_sha256 == expected(tmp_path / "plain", **short)
    assert not (tmp_path / "packed" / "job" / "activations").exists()
    folders = CacheFolders(str(tmp_path / "packed" / "job"), None)
    assert not folders._memory_folder.exists()


ALONE: dict[str, dict[str, Any]] = {
    "pipeline": {"replicas": 1, "pipelines": 1, "microbatches": 4},
    "job": {"steps": 24},
    "freeze": {"schedule": [[3, 6]]},
}
"""One replica: no pipeline can be added, and stages of frozen layers alone remain. The first change of layout pays
however few steps are left."""


def plans(ran: Ran) -> list[Plan]:
    """The plans of the generations, in order."""
    keys = [event.plan.key for event in ran.of(events.Issued)]
    issued = {event.plan.key: event.plan for event in ran.of(events.Issued)}
    return [issued[key] for key in sorted(keys) if "copies for" not in issued[key].reason]


def dropped(ran: Ran) -> list[int]:
    """Per plan, its stages without a backward pass."""
    return [schedule_of(plan).frozen_stages for plan in plans(ran)]


def kill_with(least: int, rank: int) -> Act:
    """Kill `rank` once, two steps into a generation whose plan counts on at least so many frozen layers."""
    left = [True]

    def act(running: ElasticJob, event: events.Event) -> None:
        regrouped = [each.step for each in running.log if isinstance(each, events.Regrouped)]
        issued = [each.plan.frozen for each in running.log if isinstance(each, events.Issued)]
        if not isinstance(event, StepReport) or not regrouped or issued[-1] < least:
            return
        if left and event.step >= regrouped[-1] + 2:
            left.pop()
            running.signal(rank)

    return act


KEPT: dict[str, dict[str, dict[str, Any]]] = {
    "peer": {},
    "snapshots": {"elastic": {"copy_every": 2}},
    "checkpoints": {"elastic": {"redundancy": "checkpoint"}, "checkpoint": {"every_steps": 1}},
    "twice": {"freeze": {"schedule": SCHEDULE}, "job": {"steps": 60}},
}


@pytest.mark.parametrize(
    "case",
    ["peer", "snapshots", *(pytest.param(case, marks=pytest.mark.soak) for case in ("checkpoints", "twice"))],
)
def test_stages_of_frozen_layers_drop_their_backward_passes_with_the_same_bits(
    tmp_path: Path, case: str
) -> None:
    sections = ALONE | KEPT[case]
    ran = run(
        packing(tmp_path / "packed", **sections), kill_with(6, 0), back=case in ("snapshots", "checkpoints")
    )
    (lost,) = (event for event in ran.of(events.Regrouped) if event.lost)
    assert lost.steps_lost == 0 or case in ("snapshots", "checkpoints")
    assert {plan.frozen for plan in plans(ran)} <= {0, 4, 6}
    assert max(dropped(ran)) > 0
    assert ran.state_sha256 == expected(tmp_path / "plain", **sections)


def test_a_job_that_goes_back_has_the_backward_passes_of_what_was_trained_then(tmp_path: Path) -> None:
    never = {"elastic": {"redundancy": "checkpoint"}, "checkpoint": {"every_steps": 1000}}
    sections = ALONE | never
    ran = run(packing(tmp_path / "packed", **sections), kill_with(6, 1), back=True)
    (back,) = (event for event in ran.of(events.Regrouped) if event.lost)
    assert (back.step, back.steps_lost > 4) == (0, True)
    before = ran.log[: ran.log.index(back)]
    *_, dropping, whole = (event.plan for event in before if isinstance(event, events.Issued))
    assert schedule_of(dropping).frozen_stages > 0
    assert whole.frozen == 0
    assert {event.cause for event in ran.of(events.Regrouped)} <= {"pack", "loss", "join"}
    assert ran.state_sha256 == expected(tmp_path / "plain", **sections)


@pytest.mark.parametrize(
    "asked", [pytest.param({"method": "none"}, marks=pytest.mark.soak), {"prefix": 1}], ids=str
)
def test_layers_that_are_thawed_on_request_are_trained_from_the_same_step_on(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    sections = ALONE | {"freeze": {"prefix": 6, "schedule": []}}
    done = packing(tmp_path / "packed", **sections)
    job = ControlledJob(
        done, JobView(), {9: lambda it: it.ask(**asked)}, profile=profile_of(done), packs=True
    )
    ran = job.run()
    assert isinstance(ran.state, JobFinished), ran.state
    assert ran.steps == list(range(1, 25))
    (started,) = ran.of(FreezeStarted)
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.step + 1) == ("pack", started.plan.start)
    assert [plan.frozen for plan in plans(ran)] == [6, asked.get("prefix", 0)]
    assert dropped(ran)[0] > 0
    plain = packing(tmp_path / "plain", 0.0, **sections)
    plan = replace(plain.plan, frozen=0)
    told = LaunchedJob(plain.config, plan, schedule_of(plan), freeze_plans=(started.plan,))
    assert ran.state_sha256 == run_threads(told).state_sha256


SCALED: dict[str, dict[str, Any]] = {
    "job": {"steps": 42},
    "pipeline": {"replicas": 1, "pipelines": None},
    "freeze": {"schedule": [[4, 5], [10, 7]], "batch": "scale", "lr": "linear", "frozen_cost": 0.1},
}
"""Of 8 layers, 5 frozen ones leave 3.5, so there are two replicas, and 7 leave 1.7: four."""
SCALED_STEPS = 16
"""3 steps of the first batch, 6 of twice as many samples, and 27 / 4, the last one not whole, of four times as many."""


KILLED: dict[str, Callable[[], Act]] = {
    "growing": lambda: first(PrefixFrozen, kill(1)),
    "grown": lambda: first(StepReport, kill(1), lambda event: event.step == 5),
    "formed": lambda: first(events.Regrouped, kill(1), lambda event: event.cause == "pack"),
    "growing again": lambda: first(PrefixFrozen, kill(2), lambda event: event.layers == 7),
}


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("case", "phase"),
    [
        ("plain", "growing"),
        ("shards", "growing again"),
        ("snapshots", "formed"),
        ("checkpoints", "grown"),
        pytest.param("checkpoints", "", marks=pytest.mark.soak),
        pytest.param("plain", "", marks=pytest.mark.soak),
        ("plain", "grown"),
        ("plain", "formed"),
        ("plain", "growing again"),
        pytest.param("shards", "", marks=pytest.mark.soak),
        ("shards", "formed"),
        ("checkpoints", "formed"),
    ],
)
def test_the_batch_grows_and_pipelines_follow_with_the_same_bits(
    tmp_path: Path, case: str, phase: str
) -> None:
    sections = {key: {**SCALED.get(key, {}), **CASES[case].get(key, {})} for key in {*SCALED, *CASES[case]}}
    done = packing(tmp_path / "packed", **sections)
    act = KILLED[phase]() if phase else lambda job, event: None
    ran = run(done, act, back=case in ("checkpoints", "snapshots"), steps=SCALED_STEPS)
    lost = [event for event in ran.of(events.Regrouped) if event.lost]
    assert bool(lost) == bool(phase)
    assert case in ("checkpoints", "snapshots") or sum(event.steps_lost for event in lost) == 0
    # The loss may come before the ranks have regrouped: then the plan for those that are left follows the layers.
    assert packed(ran) or lost, "no layout was changed"
    assert max(pipelines for pipelines, _ in layouts(ran)) > 1 or phase == "growing again"
    samples = {report.step: report.samples for report in ran.of(StepReport)}
    assert [samples[step] // samples[1] for step in sorted(samples)] == [1] * 3 + [2] * 6 + [4] * 7
    assert ran.state_sha256 == expected(tmp_path / "plain", **sections)
    view = fold(records(done, ran))
    assert view.last_step == SCALED_STEPS
    assert (stretches(view)[0].replicas, stretches(view)[-1].replicas) == (1, 4)
    assert "Replicas" in render(view)
    ledger = audit(records(done, ran), done.outline.train_samples)
    assert ledger.wrong == []
    assert ledger.proved_samples == SCALED_STEPS
    if (case, phase) == ("plain", "grown"):
        assert_a_replay_of_the_log_has_its_bits_and_its_legs(tmp_path, done, ran)


def assert_a_replay_of_the_log_has_its_bits_and_its_legs(folder: Path, done: Settled, ran: Ran) -> None:
    log = EventLog(folder / "events.jsonl")
    for record in records(done, ran):
        log.append(record)
    log.close()
    history = recorded(folder / "events.jsonl", done)
    again = packing(folder / "replayed", **SCALED)
    replayed = ControlledJob(
        again, JobView(), {}, freezing=history, profile=profile_of(again), packs=True
    ).run()
    assert isinstance(replayed.state, JobFinished), replayed.state
    assert replayed.state_sha256 == ran.state_sha256
    grown = [[(each.step, each.leg) for each in of.of(PrefixFrozen) if each.leg] for of in (ran, replayed)]
    assert grown[0] == grown[1]
    assert [leg.replicas for _, leg in grown[1]] == [2, 4]
