"""Which rank is named when a cluster cannot measure a job, from the failures of all."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from orchestrator.prepare import measuring
from orchestrator.prepare.measuring import first_cause, hanging
from workers.control.rank_error import RankError
from workers.process.stacks import stacks
from workers.protocol.orders import Generation
from workers.transport.channel import Channel
from workers.transport.membership import ChannelAttempt

LOST = RankError("ChannelError: rank 1 is gone", cut_off=True)
OWN = RankError("the forward pass of layer up raised ValueError", user_error=True)
DIED = RayActorError()
LATE = GetTimeoutError()

CALL = '  File "/ray/function_manager.py", line 9, in actor_method_executor\n    return method(*args)\n'
PROFILE = f'{CALL}  File "/site/workers/rank.py", line 9, in profile\n    return measure(subject)\n'
GATHER = '  File "/site/workers/transport/process_group.py", line 9, in all_gather\n    self._gathers.get()\n'
LAYER = '  File "/home/me/model.py", line 9, in forward\n    while True: pass\n'
HELPER = (
    'thread receive:\n  File "/lib/python3.11/threading.py", line 9, in _bootstrap\n    self._bootstrap_inner()\n'
    '  File "/site/workers/transport/waiter.py", line 9, in _call_all\n    calls.get()\n'
)
WAITS = f"thread 140:\n{PROFILE}{GATHER}{HELPER}"
HANGS = f"thread 140:\n{PROFILE}{LAYER}{HELPER}"


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ((LOST, DIED), 1),
        ((LOST, LATE), 1),
        ((LATE, DIED), 1),
        ((LATE, LOST, DIED, OWN), 3),
        ((LOST, LATE, AssertionError("a defect")), 2),
        ((DIED, DIED), 0),
        ((LOST, LOST), 0),
    ],
)
def test_the_cause_is_the_failure_that_no_other_explains(
    failures: tuple[BaseException, ...], first: int
) -> None:
    assert first_cause(dict(enumerate(failures))) == first


@pytest.mark.parametrize(
    ("stacks", "hung"),
    [
        ({0: WAITS, 1: HANGS, 3: WAITS}, [1]),
        ({0: WAITS, 2: ""}, [2]),
        ({0: HANGS, 1: HANGS}, [0, 1]),
        ({0: WAITS, 1: WAITS}, [0, 1]),
    ],
)
def test_of_late_ranks_those_hang_that_do_not_wait_for_others(
    stacks: dict[int, str], hung: list[int]
) -> None:
    assert hanging(stacks) == hung


def test_a_rank_that_waits_in_its_join_shows_it() -> None:
    opened, joins = threading.Event(), threading.Event()

    def open_channel() -> Channel:
        joins.set()
        opened.wait()
        raise RuntimeError("enough")

    def join() -> None:
        with pytest.raises(RuntimeError, match="enough"):
            ChannelAttempt(open_channel).wait()

    told: list[str] = []
    reading = threading.Thread(target=lambda: (joins.wait(), told.append(stacks()), opened.set()))
    reading.start()
    join()
    reading.join()
    assert hanging({0: told[0], 1: HANGS}) == [1]


def test_a_wait_for_a_rank_outlasts_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank that waited would have failed by the time that its stack is read."""
    formed: list[Generation] = []

    def call_all(actors: list[Any], method: str, timeout_s: float, *arguments: Any) -> list[Any]:
        formed.extend(arguments)
        return [("127.0.0.1", 1)]

    monkeypatch.setattr(measuring, "call_all", call_all)
    measuring._measure([None, None], wait_s=1.0, timeout_s=10.0)
    assert [generation.timeout_s > 10.0 for generation in formed] == [True]
