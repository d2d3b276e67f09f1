"""What disturbed a measurement is what its machine did beside its ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_profile import DEVICE, layer

from workers.profiling.measured import Measured, ProcessorLoad, _others, _spread


def measured(
    rank: int, machine: str, load: ProcessorLoad | None, repeats_s: tuple[float, ...] = (1.0,)
) -> Measured:
    return Measured(
        rank=rank,
        layers=(layer("a"),),
        repeats_s=repeats_s,
        device=replace(DEVICE, machine=machine),
        links=(),
        commit_s=0.0,
        receives_ahead=0,
        sends_kept=0,
        load=load,
        checked=True,
    )


def load(busy: float, own: float, window_s: float = 2.0) -> ProcessorLoad:
    return ProcessorLoad(window_s=window_s, cores=4, busy_s=busy * window_s, own_s=own * window_s)


def test_ranks_of_one_machine_are_no_other_work() -> None:
    quiet = [measured(rank, "m", load(2.0, 1.0)) for rank in range(2)]
    assert _others(quiet) == 0.0
    # Beside them, other processes keep one and a half of four cores busy.
    beside = [measured(rank, "m", load(3.5, 1.0, window_s=2.0 + rank)) for rank in range(2)]
    assert _others(beside) == pytest.approx(1.5 / 4)
    assert _others([*beside, measured(2, "quiet", load(1.0, 1.0))]) == pytest.approx(1.5 / 4)
    assert _others([measured(0, "m", load(1.0, 1.2))]) == 0.0
    assert _others([measured(0, "m", None)]) == 0.0


def test_the_spread_of_repeats() -> None:
    assert _spread((1.0,)) == 0.0
    assert _spread((1.0,) * 9) == 0.0
    assert _spread((1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0)) == pytest.approx(0.5)
