"""A fault travels as JSON, and anything else is refused with a message."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.protocol.errors import JobError


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind=FaultKind.KILL, step=40, phase=FaultPhase.BACKWARD),
        Fault(kind=FaultKind.STOP, seconds=5, after_s=1.5),
        Fault(kind=FaultKind.SLOW, factor=2, steps=10),
        Fault(kind=FaultKind.FILL_DISK, times=3),
    ],
)
def test_it_travels_as_json(fault: Fault) -> None:
    assert Fault.from_json(json.loads(json.dumps(fault.to_json()))) == fault


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "kind"),
        ({"kind": "kil"}, "'kill'"),
        ({"kind": "kill", "step": 0}, "greater than 0"),
        ({"kind": "kill", "phase": "commit"}, "'in-commit'"),
        ({"kind": "kill", "rank": 1}, "rank"),
        ({"kind": "kill", "seconds": 1}, "kill takes no seconds"),
        ({"kind": "stop"}, "stop needs seconds"),
        ({"kind": "stop", "seconds": 0}, "greater than 0"),
        ({"kind": "slow"}, "slow needs factor"),
        ({"kind": "slow", "factor": 0.5}, "greater than or equal to 1"),
        ({"kind": "throttle-link"}, "throttle-link needs bytes_per_s"),
        ({"kind": "oom"}, "oom needs limit_bytes"),
        ({"kind": "nan", "phase": "saving"}, "leave the phase out"),
        ({"kind": "kill", "after_s": math.inf}, "finite"),
        ({"kind": "stop", "seconds": math.nan}, "finite"),
    ],
)
def test_what_is_no_fault_is_refused_in_words(values: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as error:
        Fault.from_json(values)
    assert said in str(error.value)
