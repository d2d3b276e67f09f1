"""Reads ahead: the same calls in order, errors in their place, time hidden where there is some, no thread left."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from jobs import job, small_config
from pace import patient
from small_models import Vectors

from benchmarks.parts.rank_threads import Hub, LocalChannel, run_threads
from workers.config import DataConfig, ModelConfig
from workers.data import read_ahead
from workers.data.dataset import Batch, OpenData
from workers.data.read_ahead import AHEAD, SLOW_READS, SLOW_S, ReadAhead, ReadResult, WantedRead, timed
from workers.data.tokenizer import ByteTokenizer
from workers.launch.ranks import LaunchedRun, assignment
from workers.profiling.profiler import reading
from workers.protocol.orders import Generation
from workers.protocol.reports import Report, SampleReport, ValidationReport
from workers.rank import Rank
from workers.reproducibility import rng

CPU = torch.device("cpu")
AHEAD_OF_IT = "read-ahead"
PLAINLY_SLOW_S = 10 * SLOW_S
"""Slow too where another thread of this process computes for a moment meanwhile."""


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == AHEAD_OF_IT]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + patient(5)
    while running() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not running()


def reads(step: int, microbatches: int = 8) -> list[WantedRead]:
    return [WantedRead(step, microbatch, inputs=True, targets=True) for microbatch in range(microbatches)]


class Source:
    """Notes which thread reads what, and refuses two reads at once."""

    def __init__(self, takes: Callable[[WantedRead], None] = lambda _: time.sleep(PLAINLY_SLOW_S)) -> None:
        self.read: list[tuple[int, int]] = []
        self.by: list[str] = []
        self._takes = takes
        self._turn = threading.Lock()

    def __call__(self, wanted: WantedRead) -> ReadResult:
        assert self._turn.acquire(blocking=False), "two reads at once"
        try:
            self.read.append((wanted.step, wanted.microbatch))
            self.by.append(threading.current_thread().name)
            self._takes(wanted)
            at = 100 * wanted.step + wanted.microbatch
            return ReadResult([at], Batch((torch.tensor([at]),), (torch.tensor([-at]),)))
        finally:
            self._turn.release()

    @property
    def ahead(self) -> int:
        return self.by.count(AHEAD_OF_IT)


def take_all(reading: ReadAhead, wanted: list[WantedRead]) -> None:
    for one in wanted:
        found = reading.collect(one.step, one.microbatch)
        at = 100 * one.step + one.microbatch
        assert found.samples == [at]
        assert found.batch.inputs[0].tolist() == [at]
        assert found.batch.targets[0].tolist() == [-at]


def test_slow_reads_are_made_ahead_in_their_order_over_steps() -> None:
    source, reading = Source(), ReadAhead(CPU, 1)
    steps = [reads(0), reads(1), reads(2)]
    for step, following in pairwise([*steps, []]):
        reading.begin([*step, *following[:1]], source)
        take_all(reading, step)
    assert source.read == [(one.step, one.microbatch) for step in steps for one in step]
    assert source.ahead == len(source.read) - SLOW_READS
    assert len(running()) == 1
    reading.stop()


def test_no_more_is_read_than_a_few_and_what_is_not_needed_is_let_go() -> None:
    source, reading = Source(), ReadAhead(CPU, 1)
    reading.begin(reads(0), source)
    take_all(reading, reads(0)[:SLOW_READS])
    deadline = time.monotonic() + patient(5)
    while len(source.read) < SLOW_READS + AHEAD and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(PLAINLY_SLOW_S)
    assert len(source.read) == SLOW_READS + AHEAD
    # The step is rolled back: it reads its own again, from the first, and so does one of another plan.
    reading.begin(reads(0), source)
    take_all(reading, reads(0)[:4])
    other = Source()
    reading.begin(reads(0), other)
    take_all(reading, reads(0))
    assert source.read[SLOW_READS + AHEAD :][:4] == [(0, microbatch) for microbatch in range(4)]
    assert other.read == [(0, microbatch) for microbatch in range(8)]
    assert other.ahead == 8
    # What one plan has read for the next step is not the next plan's.
    third = Source()
    reading.begin([*reads(1), *reads(2)[:1]], other)
    take_all(reading, reads(1))
    reading.begin(reads(2), third)
    take_all(reading, reads(2))
    assert third.read == [(2, microbatch) for microbatch in range(8)]
    reading.stop()


def test_half_of_a_batch_is_brought_where_half_is_needed() -> None:
    reading = ReadAhead(CPU, 1)
    wanted = [WantedRead(0, number, inputs=number % 2 == 0, targets=number % 2 == 1) for number in range(6)]
    reading.begin(wanted, Source())
    found = [reading.collect(0, number).batch for number in range(6)][SLOW_READS:]
    assert [(len(batch.inputs), len(batch.targets)) for batch in found] == [(0, 1), (1, 0), (0, 1)]
    reading.stop()


def test_the_time_of_a_slow_source_is_hidden_behind_computing() -> None:
    source, reading = Source(), ReadAhead(CPU, 1)
    reading.begin(reads(0, 12), source)
    take_all(reading, reads(0, 12)[:SLOW_READS])
    for microbatch in range(SLOW_READS, 12):
        deadline = time.monotonic() + patient(5)
        while len(source.read) <= microbatch:
            assert time.monotonic() < deadline, "nobody reads while the rank computes"
            time.sleep(0.001)
        reading.collect(0, microbatch)
    assert source.by[SLOW_READS:] == [AHEAD_OF_IT] * (12 - SLOW_READS)
    reading.stop()


def busy(_: WantedRead) -> None:
    until = time.thread_time() + 3 * SLOW_S
    while time.thread_time() < until:
        pass


def draws(_: WantedRead) -> None:
    time.sleep(PLAINLY_SLOW_S)
    torch.rand(1)


@pytest.mark.parametrize("takes", [lambda _: None, busy, draws])
def test_others_are_read_where_they_are_needed(takes: Callable[[WantedRead], None]) -> None:
    """Quick ones; those whose thread would compete with computing; those that draw between the draws of layers."""
    source, reading = Source(takes), ReadAhead(CPU, 1)
    for step in range(2):
        reading.begin([*reads(step), *reads(step + 1)[:1]], source)
        take_all(reading, reads(step))
    assert set(source.by) == {threading.current_thread().name}
    assert source.read == [(step, microbatch) for step in range(2) for microbatch in range(8)]
    if takes is busy:  # a GPU's host has a core for it
        gpus = ReadAhead(torch.device("cuda"), 1)
        gpus._staging = reading._staging
        gpus.begin(reads(0), source)
        take_all(gpus, reads(0))
        assert source.ahead == 8 - SLOW_READS
        gpus.stop()


@pytest.mark.parametrize("then", ["slow", "quick", "undecided"])
def test_now_and_then_a_read_in_place_shows_whether_reads_are_still_slow(
    monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr(read_ahead, "AGAIN", 6)

    def takes(wanted: WantedRead) -> None:
        if wanted.microbatch + 8 * wanted.step < 5 or then == "slow":
            time.sleep(PLAINLY_SLOW_S)
        elif then == "undecided":
            others_compute(wanted)

    source, reading = Source(takes), ReadAhead(CPU, 1)
    for step in range(4):
        reading.begin([*reads(step), *reads(step + 1)[:1]], source)
        take_all(reading, reads(step))
    reading.stop()
    read = [(step, microbatch) for step in range(4) for microbatch in range(8)]
    assert source.read[: len(read)] == read
    ahead = ([False] * SLOW_READS + ([True] * 6 + [False]) * len(read))[: len(read)]
    if then == "quick":
        ahead[SLOW_READS + 6 :] = [False] * (len(read) - SLOW_READS - 6)
    assert [by == AHEAD_OF_IT for by in source.by][: len(read)] == ahead


def others_compute(wanted: WantedRead) -> None:
    computing = threading.Thread(target=busy, args=(wanted,))
    computing.start()
    computing.join()


def test_a_profile_decides_as_training_does_where_some_reads_prove_nothing() -> None:
    (wanted,) = reads(0, 1)
    found = reading(lambda number: time.sleep(PLAINLY_SLOW_S) if number % 2 else others_compute(wanted), CPU)
    assert found.ahead


def test_waiting_for_threads_of_the_process_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have Python's interpreter."""

    def found(device: torch.device, *, all_computed_s: float, waits: int = 1) -> bool | None:
        """Of a read that takes 3 ms, of which its thread computes for none."""
        clocks = iter([(0.0, 0.0, 0.0, 0), (3 * SLOW_S, 0.0, all_computed_s, waits)])
        with monkeypatch.context() as clock:
            clock.setattr(read_ahead, "_now", lambda: next(clocks))
            return timed(lambda: None, device)[1].slow

    assert found(CPU, all_computed_s=2.5 * SLOW_S) is None
    assert found(CPU, all_computed_s=1.5 * SLOW_S) is True
    assert found(CPU, all_computed_s=0.0, waits=0) is False  # other processes had its core
    assert found(torch.device("cuda"), all_computed_s=2.5 * SLOW_S) is True
    assert timed(lambda: time.sleep(PLAINLY_SLOW_S), CPU)[1].slow

    def takes(wanted: WantedRead) -> None:
        time.sleep(PLAINLY_SLOW_S) if wanted.microbatch % 2 == 0 else others_compute(wanted)

    for _ in range(10):
        reading = ReadAhead(CPU, 1)
        reading.begin(reads(0), Source(takes))
        take_all(reading, reads(0)[: 2 * SLOW_READS - 1])
        assert reading.ahead
        reading.stop()
        reading.wait()


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_an_error_is_raised_where_its_microbatch_is_needed(kind: type[BaseException]) -> None:
    def fails(wanted: WantedRead) -> None:
        time.sleep(PLAINLY_SLOW_S)
        if wanted.microbatch == 5:
            raise kind("no such file")

    source, reading = Source(fails), ReadAhead(CPU, 1)
    reading.begin(reads(0), source)
    take_all(reading, reads(0)[:5])
    deadline = time.monotonic() + patient(5)
    while len(source.read) < 6 and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(kind, match="no such file"):
        reading.collect(0, 5)
    assert source.read == [(0, microbatch) for microbatch in range(6)]
    reading.stop()


@pytest.mark.parametrize("generator", [None, torch.Generator()], ids=["layers'", "its own"])
def test_a_source_that_draws_later_draws_between_the_layers_again(generator: torch.Generator | None) -> None:
    drawn: list[tuple[str, float]] = []

    def takes(wanted: WantedRead) -> None:
        time.sleep(PLAINLY_SLOW_S)
        if wanted.microbatch >= 5:
            number = float(torch.rand((), generator=generator))
            drawn.append((threading.current_thread().name, number))

    source, reading = Source(takes), ReadAhead(CPU, 1)
    reading.begin(reads(0), source)
    torch.manual_seed(3)
    take_all(reading, reads(0))
    here = threading.current_thread().name
    assert source.ahead == (3 if generator is None else 5)
    assert [by for by, _ in drawn] == [here if generator is None else AHEAD_OF_IT] * 3
    if generator is None:
        keyed = []
        for microbatch in range(5, 8):
            with rng.keyed(rng.key(0, "data", 0, microbatch)):
                keyed.append(float(torch.rand(())))
        assert [number for _, number in drawn] == keyed
    assert reading.ahead == (generator is not None)
    reading.stop()


def takes_back(wanted: WantedRead) -> None:
    time.sleep(PLAINLY_SLOW_S)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(wanted.microbatch)
        torch.rand(())


def makes_do_without(wanted: WantedRead) -> None:
    time.sleep(PLAINLY_SLOW_S)
    with suppress(RuntimeError):
        if wanted.microbatch >= 5:
            torch.rand(())


@pytest.mark.parametrize(("takes", "ahead"), [(takes_back, 0), (makes_do_without, 3)])
def test_draws_that_leave_no_trace_are_noticed(takes: Callable[[WantedRead], None], ahead: int) -> None:
    source, reading = Source(takes), ReadAhead(CPU, 1)
    reading.begin(reads(0), source)
    take_all(reading, reads(0))
    assert (source.ahead, reading.ahead) == (ahead, False)
    reading.stop()


def test_a_source_that_only_its_own_thread_may_read_is_read_there() -> None:
    own = threading.current_thread()

    def refuses(_: WantedRead) -> None:
        time.sleep(PLAINLY_SLOW_S)
        if threading.current_thread() is not own:
            raise RuntimeError("made in another thread")

    source, reading = Source(refuses), ReadAhead(CPU, 1)
    for step in range(2):
        reading.begin(reads(step), source)
        take_all(reading, reads(step))
    assert source.ahead == 1
    assert not reading.ahead


def test_stopping_waits_for_no_read_and_the_next_read_does() -> None:
    rounds: list[tuple[threading.Event, threading.Event]] = []

    def takes(wanted: WantedRead) -> None:
        time.sleep(PLAINLY_SLOW_S)
        if threading.current_thread().name == AHEAD_OF_IT and wanted.microbatch >= 4:
            reached, go = rounds[-1]
            reached.set()
            assert go.wait(patient(60))

    source, reading = Source(takes), ReadAhead(CPU, 1)
    for _ in range(4):
        rounds.append((threading.Event(), threading.Event()))
        reached, go = rounds[-1]
        reading.begin(reads(0), source)
        take_all(reading, reads(0)[:4])
        assert reached.wait(patient(60))
        reading.stop()  # in the middle of a read, which does not end until `go`
        assert source._turn.locked()
        threading.Timer(0.01, go.set).start()
    assert source.ahead > 4
    reading.wait()  # `Source` refuses another read beside one that goes on
    assert not running()


class Slow(Vectors):
    """Of which tests see who read what. A read takes as long as a disk."""

    opened: list[Slow] = []  # noqa: RUF012 (by all ranks of a test)
    fails_at: int | None = None
    read_s = PLAINLY_SLOW_S

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int]]] = []
        self.threads: set[str] = set()
        self._turn = threading.Lock()
        Slow.opened.append(self)

    def train(self, indices: list[int]) -> Batch:
        return self._noted("train", indices)

    def validation(self, indices: list[int]) -> Batch:
        return self._noted("validation", indices)

    def _noted(self, kind: str, indices: list[int]) -> Batch:
        assert self._turn.acquire(blocking=False), "two reads at once"
        self.calls.append((kind, indices))
        self.threads.add(threading.current_thread().name)
        time.sleep(self.read_s)
        self._turn.release()
        if len(self.calls) == Slow.fails_at:
            raise OSError(f"read {len(self.calls)} failed")
        return super().validation(indices) if kind == "validation" else Vectors.train(self, indices)


def trained(
    folder: Path, schedule: str, replicas: int, validate_every: int = 2
) -> tuple[LaunchedRun, list[Slow]]:
    config = small_config(
        folder,
        "dropout",
        replicas=replicas,
        validate_every=validate_every,
        data=DataConfig(source="test_read_ahead:Slow"),
    )
    Slow.opened.clear()
    return run_threads(job(config, ranks=2, schedule=schedule)), [*Slow.opened]


@pytest.mark.parametrize(("schedule", "replicas"), [("zbv", 1), ("1f1b", 2)])
def test_training_makes_the_same_calls_and_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str, replicas: int
) -> None:
    """In zbv one rank has the first and the last stage, and reads each microbatch twice."""
    monkeypatch.setattr(read_ahead, "AGAIN", 3)
    found, sources = trained(tmp_path / "ahead", schedule, replicas)
    assert any(AHEAD_OF_IT in source.threads for source in sources)
    monkeypatch.setattr(read_ahead, "SLOW_READS", 10**9)
    expected, at_once = trained(tmp_path / "at once", schedule, replicas)
    assert not any(AHEAD_OF_IT in source.threads for source in at_once)
    assert found.state_sha256 == expected.state_sha256

    def calls(sources: list[Slow]) -> list[list[tuple[str, list[int]]]]:
        return sorted(source.calls for source in sources)

    assert calls(sources) == calls(at_once)
    assert {kind for source in sources for kind, _ in source.calls} == {"train", "validation"}


class Text(Slow):
    """Language, so that a sample is taken after the last step."""

    def __init__(self) -> None:
        super().__init__()
        self._x = self._y = torch.randint(0, 256, (72, 16), generator=torch.Generator().manual_seed(7))


def text() -> OpenData:
    return OpenData(dataset=Text(), tokenizer=ByteTokenizer(), vocabulary=256)


@pytest.mark.parametrize("validated", [True, False], ids=["sample", "validation"])
def test_what_reads_between_steps_waits_for_a_read_under_way(tmp_path: Path, validated: bool) -> None:
    """A rank that read inputs in one generation may have none to read in the next, whose steps would wait."""
    config = small_config(
        tmp_path,
        steps=1,
        sample_tokens=1,
        model=ModelConfig(family="gpt", layers=6, width=32, heads=2, context=16),
        data=DataConfig(source="test_read_ahead:text"),
    )
    Slow.opened.clear()
    reports: list[Report] = []
    rank, work = Rank(config, 0, reports.append), job(config)
    rank.setup()
    (source,) = Slow.opened

    def train(number: int) -> None:
        assert rank.follow(replace(assignment(work, 0), step=number - 1)) is None
        generation = Generation(
            number=number, epoch=1, members=(0,), store_host="127.0.0.1", store_port=1, timeout_s=60.0
        )
        rank.join(generation, LocalChannel(Hub(1), 0))
        rank.train()

    train(1)
    source.read_s = 0.2
    reading = rank._equipment.reading
    reading.ahead = True
    reading.begin(reads(1), lambda _: ReadResult([0], source.train([0])))
    while not source._turn.locked():
        time.sleep(0.001)
    reading.stop()
    source.read_s = 0.0
    left = rank._commit.left
    assert left is not None
    rank._commit.left = replace(left, validated=validated)
    reports.clear()
    train(2)  # `Slow` refuses two reads at once
    assert [type(report) for report in reports if isinstance(report, (ValidationReport, SampleReport))] == [
        *([] if validated else [ValidationReport]),
        SampleReport,
    ]
    rank.close()


def test_an_error_ends_the_job_in_the_same_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slow, "fails_at", 11)
    said = []
    for slow_reads in (SLOW_READS, 10**9):
        monkeypatch.setattr(read_ahead, "SLOW_READS", slow_reads)
        with pytest.raises(Exception, match="read 11 failed") as raised:
            trained(tmp_path / str(slow_reads), "gpipe", 1, 0)
        said.append(re.sub(r"\d+\.\d+ s", "", str(raised.value)))
    assert said[0] == said[1]
