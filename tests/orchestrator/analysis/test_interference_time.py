"""What a disturbed rank cost: productive time against an oracle, and how soon each visit was answered."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from disturbed_run import ALONE_S, BEST_S, SLOW_S, disturbed

from orchestrator.analysis.interference_time import interference_time
from orchestrator.events.rehearsed import DisturbedSteps
from orchestrator.history.job_view import JobView

COUNTED = 95
"""Steps 6 to 100."""
ORACLE_S = 55 * ALONE_S + 40 * BEST_S


def test_productive_time_is_the_time_of_an_oracle_over_the_time_taken() -> None:
    found = interference_time([disturbed("off"), disturbed("measured")])
    assert found.undisturbed_s == pytest.approx(ALONE_S)
    assert found.best_s == pytest.approx(BEST_S)
    off, adapted = found.trials
    # Without adaptation all 40 steps are slow; with it, the first three of each visit.
    assert (off.policy, off.steps, off.seconds) == ("off", COUNTED, pytest.approx(55 * ALONE_S + 40 * SLOW_S))
    assert adapted.seconds == pytest.approx(55 * ALONE_S + 6 * SLOW_S + 34 * BEST_S)
    assert off.productive == pytest.approx(ORACLE_S / off.seconds)
    assert adapted.productive == pytest.approx(ORACLE_S / adapted.seconds)
    assert adapted.undisturbed == pytest.approx(COUNTED * ALONE_S / adapted.seconds)
    assert (off.disturbed_s, adapted.disturbed_s) == (pytest.approx(SLOW_S), pytest.approx(BEST_S))
    assert (off.moves, adapted.moves) == (0, 3)
    assert found.same_state is True


def test_each_visit_says_how_soon_it_was_answered() -> None:
    (adapted,) = interference_time([disturbed("measured")]).trials
    first, second = adapted.answers
    assert (first.first, first.last, first.noticed, first.slowdown, first.in_force) == (21, 40, 2, 3.0, 3)
    assert (second.noticed, second.slowdown, second.in_force) == (0, 2.8, 3)
    assert (first.slowdown_before, second.slowdown_before) == (1.0, 1.0)
    assert [(plan.step, plan.predicted_s, plan.measured_s) for plan in adapted.plans] == [
        (21, BEST_S, pytest.approx(BEST_S)),
        (41, BEST_S, pytest.approx(ALONE_S)),
        (61, BEST_S, pytest.approx(BEST_S)),
    ]
    assert first.step_s == pytest.approx(BEST_S)
    (off,) = interference_time([disturbed("off")]).trials
    assert [(answer.noticed, answer.in_force) for answer in off.answers] == [(None, None)] * 2
    assert off.answers[0].step_s == pytest.approx(SLOW_S)


def test_other_states_are_seen_and_a_job_without_visits_has_no_best_cut() -> None:
    assert interference_time([disturbed("off"), disturbed("measured", state="b" * 64)]).same_state is False
    alone = interference_time([disturbed("off", visits=())])
    assert (alone.best_s, alone.same_state, alone.trials[0].disturbed_s) == (None, None, None)
    assert json.loads(json.dumps(alone.to_dict()))["trials"][0]["policy"] == "off"


def test_a_job_that_ended_early_has_the_numbers_of_its_steps() -> None:
    short = disturbed("off", last=30, visits=(DisturbedSteps(first=21, last=30),))
    (trial,) = interference_time([short]).trials
    assert trial.steps == 25
    assert trial.productive == pytest.approx(1.0)  # the only cut that was measured is the best one
    (nothing,) = interference_time([disturbed("off", last=3, visits=())]).trials
    assert (nothing.steps, nothing.productive, nothing.answers) == (0, None, ())


def watched(policy: str, others: float, *, out_of_time: bool = False, **changes: Any) -> JobView:
    view = disturbed(policy, **changes)
    assert view.disturbed is not None
    view.disturbed = replace(view.disturbed, others=others, out_of_time=out_of_time)
    return view


def test_the_verdict_says_whether_adaptation_pays() -> None:
    found = interference_time([watched("off", 0.02), watched("measured", 0.03)])
    assert found.conclusive
    assert found.verdict.startswith("adapt.policy = 'measured' pays: productive time ")
    swapped = interference_time([watched("measured", 0.0), watched("off", 0.0)])
    assert "adapt.policy = 'off' does not pay" in swapped.verdict
    same = interference_time([watched("off", 0.0), watched("off", 0.0)])
    assert "makes no difference" in same.verdict
    assert "nothing to compare" in interference_time([watched("off", 0.0)]).verdict
    # Logs of programs that did not watch the machine.
    assert interference_time([disturbed("off"), disturbed("measured")]).conclusive


def test_a_disturbed_machine_and_a_job_out_of_time_make_it_inconclusive() -> None:
    busy = interference_time([watched("off", 0.1), watched("measured", 0.48)])
    assert not busy.conclusive
    assert busy.verdict == "inconclusive: the machine was disturbed, other work took 48.0 % of its processors"
    early = watched("measured", 0.48)
    early.moves[0] = replace(early.moves[0], step=5)
    told = interference_time([watched("off", 0.1), early]).verdict
    assert told.endswith(", and layers moved 1 time before the neighbour came")
    late = interference_time([watched("off", 0.0, out_of_time=True), watched("measured", 0.0)])
    assert late.verdict == "inconclusive: the time was over before the last step with adapt.policy = 'off'"
    assert late.to_dict()["verdict"] == late.verdict
