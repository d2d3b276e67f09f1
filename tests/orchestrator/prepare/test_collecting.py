"""Windows beside real neighbours: each is measured, none stays behind, and a row pairs one stage's surroundings with
the time of another."""

from __future__ import annotations

import os

import numpy as np
import psutil
import pytest

from orchestrator.prepare.collecting import collect
from planner.features import NAMES
from planner.interference.dataset import ALONE
from workers.interference.neighbours import KINDS, PINNED, beside
from workers.interference.stage import MeasuredStage, Size
from workers.sampling.host import HostReader

SIZES = (Size(1, 16), Size(2, 16))


def column(rows: np.ndarray, name: str) -> np.ndarray:
    return rows[:, NAMES.index(name)]


def test_windows_are_collected_beside_real_neighbours() -> None:
    said: list[str] = []
    conditions = (("compute", "heavy"), ("memory", "light"))
    collected = collect(
        HostReader().read, said.append, sizes=SIZES, rounds=2, window_s=0.1, conditions=conditions
    )
    windows = collected.windows
    assert said == ["alone", "beside a heavy neighbour: compute", "beside a light neighbour: memory"]
    assert windows.neighbours == ("compute", "memory")
    # Four windows beside each neighbour, each but the first with the one or two before it.
    assert windows.kinds.count("compute") == windows.kinds.count("memory") == 1 + 2 + 2
    assert set(zip(windows.kinds, windows.levels, strict=True)) == {(ALONE, ""), *conditions}
    assert set(column(windows.rows, "layers")) == {1.0, 2.0}
    assert np.all(column(windows.rows, "measured_ratio") > 0)
    assert np.all(np.isfinite(column(windows.rows, "cpu_others")))
    assert np.all(np.isnan(column(windows.rows, "gpu_busy")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_neighbour_works_until_its_block_ends_and_leaves_nothing(kind: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    with beside(kind, "heavy"):
        started = set(psutil.Process().children(recursive=True)) - before
        assert started
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive


def test_a_neighbour_on_one_core_has_two_processes_there() -> None:
    core = min(os.sched_getaffinity(0))
    before = set(psutil.Process().children(recursive=True))
    with beside("compute", "heavy", (core,)):
        started = set(psutil.Process().children(recursive=True)) - before
        assert [process.cpu_affinity() for process in started] == [[core]] * PINNED


def test_there_are_no_other_neighbours() -> None:
    with (
        pytest.raises(ValueError, match="no neighbour noise heavy: the kinds are compute"),
        beside("noise", "heavy"),
    ):
        pass


def test_a_stage_knows_what_it_is() -> None:
    stage = MeasuredStage(Size(2, 16))
    seconds, forward_share = stage.run(0.0)
    assert seconds > 0
    assert 0 < forward_share < 1
    assert stage.features["layers"] == 2
    assert stage.features["messages"] == 2 * 4 * 64 * 16 * 4
