"""The phases of freezing: defaults become numbers, what does not fit the job is refused with the way out."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.freeze_phases import settle_phases
from workers.config import FreezeConfig, OptimizerConfig
from workers.protocol import JobError


def settled(steps: int, warmup_steps: int = 0, **freeze: object) -> tuple[int | None, ...]:
    done = settle_phases(
        FreezeConfig.model_validate(freeze), OptimizerConfig(warmup_steps=warmup_steps), steps
    )
    return done.warm_up, done.monitoring, done.ramp


@pytest.mark.parametrize(
    ("steps", "warmup_steps", "freeze", "expected"),
    [
        (300, 0, {"method": "timelyfreeze"}, (30, 40, 70)),
        (300, 20, {"method": "timelyfreeze"}, (20, 30, 60)),
        (300, 20, {"method": "timelyfreeze+apf", "warm_up": 0}, (0, 10, 40)),
        (300, 20, {"method": "timelyfreeze", "monitoring": 26, "ramp": 26}, (20, 26, 26)),
        (300, 20, {"method": "timelyfreeze", "ramp": 300}, (20, 30, 300)),
        (6, 20, {"method": "timelyfreeze"}, (3, 5, 5)),
        (3, 20, {"method": "timelyfreeze"}, (1, 3, 3)),
        (20, 20, {"method": "timelyfreeze"}, (10, 15, 17)),
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
        (100, {"ramp": 101}, "longer than the job.*ramp = 101.*job.steps = 100.*to 100 at most"),
        (6, {"warm_up": 5}, "longer than the job.*monitoring = 7, ramp = 7.*job.steps = 6"),
        (1, {}, "longer than the job.*monitoring = 2.*job.steps = 1"),
    ],
)
def test_phases_that_do_not_fit(steps: int, freeze: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        settled(steps, method="timelyfreeze", **freeze)


def test_a_warm_up_as_long_as_the_job() -> None:
    with pytest.raises(JobError, match=r"freeze.warm_up = 5 leaves nothing to freeze in job.steps = 5"):
        settled(5, method="autofreeze", warm_up=5)
