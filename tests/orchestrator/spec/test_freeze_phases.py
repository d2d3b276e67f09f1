"""The phases of freezing: defaults become numbers, and what does not fit the job is refused with a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.prepare.resumption import adopt
from orchestrator.spec.freeze_phases import settle_phases
from orchestrator.spec.job_spec import JobConfig, Spec
from workers.config import FreezeConfig, OptimizerConfig
from workers.protocol.errors import JobError


def settled(steps: int, warmup_steps: int = 0, **freeze: object) -> tuple[int | None, ...]:
    done = settle_phases(
        FreezeConfig.model_validate(freeze), OptimizerConfig(warmup_steps=warmup_steps), steps
    )
    return done.warm_up, done.monitoring, done.ramp


@pytest.mark.parametrize(
    ("steps", "warmup_steps", "freeze", "expected"),
    [
        (300, 0, {"method": "timelyfreeze", "r_max": 0.8}, (30, 40, 70)),
        (300, 20, {"method": "timelyfreeze", "r_max": 0.8}, (20, 30, 60)),
        (300, 20, {"method": "timelyfreeze"}, (20, 24, 54)),
        (300, 20, {"method": "auto"}, (20, 24, 54)),
        (300, 20, {"method": "timelyfreeze+apf", "r_max": 0.8, "warm_up": 0}, (0, 10, 40)),
        (300, 20, {"method": "timelyfreeze", "monitoring": 26, "ramp": 26}, (20, 26, 26)),
        (300, 20, {"method": "timelyfreeze", "r_max": 0.8, "ramp": 300}, (20, 30, 300)),
        (6, 20, {"method": "timelyfreeze"}, (3, 5, 5)),
        (3, 20, {"method": "timelyfreeze"}, (1, 3, 3)),
        (20, 20, {"method": "timelyfreeze", "r_max": 0.8}, (10, 15, 17)),
        (300, 20, {"method": "apf"}, (20, None, None)),
        (6, 20, {"method": "autofreeze"}, (3, None, None)),
        (300, 20, {"method": "none"}, (None, None, None)),
        (4, 20, {"method": "none", "ramp": 900}, (None, None, 900)),
    ],
)
def test_unset_phases_become_numbers(
    steps: int, warmup_steps: int, freeze: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert settled(steps, warmup_steps, **freeze) == expected


@pytest.mark.parametrize(
    ("steps", "freeze", "told"),
    [
        (100, {"warm_up": 30, "monitoring": 20}, "come in order.*warm_up = 30, monitoring = 20, ramp = 30"),
        (100, {"warm_up": 30, "monitoring": 40, "ramp": 35}, "come in order.*ramp = 35"),
        (100, {"warm_up": 30, "monitoring": 31}, "two steps of monitoring"),
        (
            100,
            {"ramp": 101},
            "longer than the job.*ramp = 101.*job.steps = 100: set job.steps to 101 at least, or, in a job that"
            " is not resumed, all three to 100 at most or freeze.method to none",
        ),
        (6, {"warm_up": 5}, "longer than the job.*monitoring = 7, ramp = 7.*job.steps = 6"),
        (1, {}, "longer than the job.*monitoring = 2.*job.steps = 1"),
    ],
)
def test_phases_that_do_not_fit(steps: int, freeze: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        settled(steps, method="timelyfreeze", r_max=0.8, **freeze)


def test_a_budget_does_not_go_with_a_job_that_chooses() -> None:
    with pytest.raises(
        JobError, match=r"finds out how much to freeze, and freeze\.r_max = 0\.5 is given: leave that"
    ):
        settled(100, method="auto", r_max=0.5)


def test_a_warm_up_as_long_as_the_job() -> None:
    told = (
        "freeze.warm_up = 5 leaves nothing to freeze in job.steps = 5: set job.steps to more than 5, or, in a job"
        " that is not resumed,"
    )
    with pytest.raises(JobError, match=told):
        settled(5, method="autofreeze", warm_up=5)


def test_a_resumed_job_that_is_too_short_for_its_phases_is_told_to_be_longer() -> None:
    """It must keep the phases of its run, so shorter phases, or none, are suggested only for other jobs."""
    begun = Spec(job=JobConfig(name="a", steps=1000), freeze=FreezeConfig(method="timelyfreeze", r_max=0.8))
    phases = settle_phases(begun.freeze, begun.optimizer, 1000)
    adopted = adopt(begun, {"freeze": phases.model_dump(mode="json")}).freeze
    assert settle_phases(adopted, begun.optimizer, 210) == phases
    with pytest.raises(JobError) as refused:
        settle_phases(adopted, begun.optimizer, 200)
    assert str(refused.value) == (
        "[freeze]: the phases are longer than the job: warm_up = 100, monitoring = 110, ramp = 210 are steps,"
        " and job.steps = 200: set job.steps to 210 at least, or, in a job that is not resumed, all three to 200 at"
        " most or freeze.method to none"
    )
