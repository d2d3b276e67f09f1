"""What a disturbed rank cost: productive time against an oracle, and how soon each visit was answered."""

from __future__ import annotations

import json

import pytest
from disturbed_run import ALONE_S, BEST_S, SLOW_S, disturbed

from orchestrator.analysis.interference_time import interference_time
from orchestrator.events.rehearsed import Visit

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
    short = disturbed("off", last=30, visits=(Visit(first=21, last=30),))
    (trial,) = interference_time([short]).trials
    assert trial.steps == 25
    assert trial.productive == pytest.approx(1.0)  # the only cut that was measured is the best one
    (nothing,) = interference_time([disturbed("off", last=3, visits=())]).trials
    assert (nothing.steps, nothing.productive, nothing.answers) == (0, None, ())
