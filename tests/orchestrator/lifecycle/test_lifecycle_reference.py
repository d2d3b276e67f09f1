"""The page of states and transitions is what the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.lifecycle import reference
from orchestrator.lifecycle.machine import TABLE
from orchestrator.lifecycle.states import (
    Assessing,
    Closing,
    FinishingCommit,
    State,
    Stopping,
    Training,
    Waiting,
)
from orchestrator.lifecycle.stimuli import Positioned, RankLost, Stimulus, TrainingEnded

ROOT = Path(__file__).parents[3]


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "architecture" / "lifecycle.md").read_text() == reference.reference(), (
        "run: python -m orchestrator.lifecycle.reference > docs/architecture/lifecycle.md"
    )


@pytest.mark.parametrize(("state", "stimulus"), list(TABLE))
def test_every_transition_declares_states(state: type[State], stimulus: type[Stimulus]) -> None:
    leads_to = reference.leads_to(state, stimulus)
    assert leads_to
    assert set(leads_to) <= set(reference.STATES)


def test_a_type_variable_is_the_present_state_and_an_alias_its_first() -> None:
    assert reference.leads_to(Waiting, RankLost) == (Waiting, Assessing)
    assert Stopping not in reference.leads_to(Training, TrainingEnded)
    assert {Training, Assessing, Closing} <= set(reference.leads_to(Training, TrainingEnded))
    assert {Assessing, FinishingCommit, Waiting} <= set(reference.leads_to(Assessing, Positioned))
