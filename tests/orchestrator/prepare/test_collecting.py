"""Windows beside real neighbours: each is measured, none stays behind, and a row pairs one stage's surroundings with
the time of another."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import cycle

import numpy as np
import psutil
import pytest
from pace import patient

from orchestrator.prepare.collecting import BRIEF, Condition, brief_conditions, collect, conditions
from planner.features import NAMES, FeatureSample
from planner.interference.dataset import ALONE
from workers.interference.neighbours import DEVICE_KINDS, KINDS, LEVELS, PINNED, beside
from workers.interference.stage import MeasuredStage, StageSize
from workers.sampling.host import HostReader
from workers.sampling.readings import Reading
from workers.sampling.sampler import Sampler

SIZES = (StageSize(1, 16), StageSize(2, 16))


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    sampler = Sampler([HostReader().read], every_s=0.05)
    yield sampler
    sampler.close()


def column(rows: np.ndarray, name: str) -> np.ndarray:
    return rows[:, NAMES.index(name)]


def test_windows_are_collected_beside_real_neighbours(sampler: Sampler) -> None:
    said: list[str] = []
    before = os.sched_getaffinity(0)
    own = (max(before),)
    chosen = (Condition("compute", "steady", own, own), Condition("memory", "light"))
    windows = collect(sampler, said.append, beside=chosen, sizes=SIZES, rounds=2).windows
    assert said == [
        "alone",
        "beside a steady neighbour on the same core: compute",
        "beside a light neighbour on any core: memory",
    ]
    assert os.sched_getaffinity(0) == before
    assert windows.neighbours == ("compute", "memory")
    # Four windows beside each neighbour, each but the first with the one or two before it.
    assert windows.kinds.count("compute") == windows.kinds.count("memory") == 1 + 2 + 2
    assert set(zip(windows.kinds, windows.levels, strict=True)) == {
        (ALONE, ""),
        ("compute", "steady on the same core"),
        ("memory", "light on any core"),
    }
    assert set(column(windows.rows, "layers")) == {1.0, 2.0}
    assert np.all(column(windows.rows, "measured_ratio") > 0)
    assert np.all(np.isfinite(column(windows.rows, "cpu_others")))
    assert np.all(np.isnan(column(windows.rows, "gpu_busy")))


def test_all_kinds_levels_and_places_are_measured_also_in_brief() -> None:
    found = conditions([0, 1, 2])
    assert {(each.kind, each.where) for each in found} == {
        (kind, f"on {cores}") for kind in KINDS for cores in ("any core", "the same core", "the other cores")
    }
    assert {each.level for each in found} == set(LEVELS)
    brief = brief_conditions([0, 1, 2])
    assert len(brief) <= BRIEF
    assert set(brief) < set(found)
    assert {each.kind for each in brief} == set(KINDS)
    assert {each.where for each in brief} == {each.where for each in found}
    assert {each.level for each in brief} == set(LEVELS)
    assert brief_conditions([0]) == conditions([0]) == tuple(Condition(kind, "heavy") for kind in KINDS)


def test_a_stage_on_a_gpu_has_neighbours_on_it_too() -> None:
    on_cpu, on_gpu = conditions([0, 1, 2]), conditions([0, 1, 2], "cuda:0")
    assert on_gpu[: len(on_cpu)] == on_cpu
    assert {(each.kind, each.level, each.where) for each in on_gpu[len(on_cpu) :]} == {
        (kind, level, "on the stage's device") for kind in ("matmul", "copy") for level in ("light", "heavy")
    }
    assert not {each.kind for each in on_cpu} & set(DEVICE_KINDS)
    brief = brief_conditions([0, 1, 2], "cuda:0")
    assert len(brief) <= BRIEF
    assert {each.kind for each in brief} == {*KINDS, *DEVICE_KINDS}


def test_windows_beside_neighbours_on_the_device_hold_what_it_tells() -> None:
    def gpu() -> Reading:
        return Reading(time_s=time.monotonic(), values={"gpu_busy": 0.5, "gpu_processes": 1.0})

    sampler = Sampler([HostReader().read, gpu], every_s=0.05)
    try:
        chosen = [Condition(kind, "light") for kind in DEVICE_KINDS]
        found = collect(
            sampler, lambda text: None, accelerator="cpu", beside=chosen, sizes=SIZES[:1], rounds=2
        )
    finally:
        sampler.close()
    assert found.windows.neighbours == ("copy", "matmul")
    assert "light on the stage's device" in found.windows.levels
    assert set(column(found.windows.rows, "gpu_busy")) == {0.5}
    assert any("the GPU may be busy: 1 other process on it" in warning for warning in found.warnings)


def test_a_busy_machine_is_told(sampler: Sampler) -> None:
    said: list[str] = []
    with beside("compute", "heavy"):
        chosen = [Condition("compute", "light")]
        found = collect(sampler, said.append, beside=chosen, sizes=SIZES[:1], warn=said.append)
    # At once, and not after minutes.
    assert "the machine is busy: other processes take " in said[0]
    assert said[1] == "alone"
    assert found.warnings == tuple(text for text in said if text.startswith("the machine is "))


@pytest.mark.parametrize(
    ("pass_s", "warnings"),
    [
        (
            (0.8, 1.2),
            ("the machine is noisy: times alone differ by 20% (standard deviation) from window to window",),
        ),
        ((0.95, 1.05), ()),
    ],
)
def test_a_noisy_machine_is_told_and_how_noisy(
    monkeypatch: pytest.MonkeyPatch, pass_s: tuple[float, ...], warnings: tuple[str, ...]
) -> None:
    class Idle:
        """Has a new sample at each look."""

        @property
        def newest(self) -> FeatureSample:
            return FeatureSample(values=(), window_s=0.0)

    times = cycle(pass_s)
    monkeypatch.setattr(MeasuredStage, "run", lambda self, ended: (next(times), 0.5))
    found = collect(Idle(), lambda text: None, beside=[Condition("compute", "light")], sizes=SIZES[:1])
    assert found.warnings == warnings


def test_a_machine_that_tells_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        newest: FeatureSample | None = None

    monkeypatch.setattr("orchestrator.prepare.collecting.LONGEST_WAIT_S", 0.1)
    with pytest.raises(RuntimeError, match="no sample of this machine"):
        collect(Silent(), lambda text: None, beside=[], sizes=SIZES[:1])


def test_a_neighbour_that_dies_early_ends_the_measurement() -> None:
    before = set(psutil.Process().children())
    running = beside("compute", "light")
    running.__enter__()
    (neighbour,) = set(psutil.Process().children()) - before
    neighbour.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, neighbour.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(RuntimeError, match="the neighbour compute light ended while it should have worked"):
        running.__exit__(None, None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_neighbour_works_until_its_block_ends_and_leaves_nothing(kind: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    with beside(kind, "heavy"):
        started = set(psutil.Process().children(recursive=True)) - before
        assert started
    _, alive = psutil.wait_procs(started, timeout=patient(10))
    assert not alive


@pytest.mark.each_choice
@pytest.mark.parametrize(("level", "processes"), [("light", 1), ("heavy", PINNED)])
@pytest.mark.parametrize("kind", DEVICE_KINDS)
def test_a_neighbour_works_on_the_device_and_leaves_nothing(kind: str, level: str, processes: int) -> None:
    before = set(psutil.Process().children(recursive=True))
    with beside(kind, level, accelerator="cpu"):
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) == processes
        spent_s = {process: sum(process.cpu_times()[:2]) for process in started}
        limit_s = time.monotonic() + patient(20.0)
        while any(sum(process.cpu_times()[:2]) <= spent for process, spent in spent_s.items()):
            assert time.monotonic() < limit_s, "a process of the neighbour does not work"
            time.sleep(0.05)
    _, alive = psutil.wait_procs(started, timeout=patient(10))
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


@pytest.mark.parametrize("kind", DEVICE_KINDS)
def test_without_a_gpu_there_are_no_neighbours_on_it(kind: str) -> None:
    with (
        pytest.raises(
            ValueError, match=f"no neighbour {kind} beside a stage on a CPU: .* choose one of compute"
        ),
        beside(kind, "heavy"),
    ):
        pass


def test_a_stage_knows_what_it_is() -> None:
    stage = MeasuredStage(StageSize(2, 16))
    seconds, forward_share = stage.run(lambda: True)
    assert seconds > 0
    assert 0 < forward_share < 1
    assert stage.features["layers"] == 2
    assert stage.features["messages"] == 2 * 4 * 64 * 16 * 4
