"""How many copies of a layer a device holds while ranks form anew: one, whatever its rank had before."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from jobs import job, small_config
from rank_group import with_standbys
from torch import Tensor

from benchmarks.parts.rank_threads import Hub, LocalChannel
from planner.arrivals import built_ahead
from planner.rank_program import place_programs
from planner.shards import Piece
from workers.checkpoint.folder import checkpoints
from workers.config import ElasticConfig, WorkerConfig
from workers.copies.host_copies import HostCopy
from workers.elastic import assembly, holdings
from workers.elastic.layer_source import Built, LayerSource
from workers.launch.ranks import LaunchedJob
from workers.protocol.orders import Assignment, CommitOutcome, Generation, Request, StateSource
from workers.protocol.reports import Outcome, Parted
from workers.rank import Rank
from workers.state.layer_state import LayerState, digest, host_copy

SECRET = b"a secret of the tests"
LAYERS = range(8)


class Alive:
    """Counts the states on devices that are alive whenever one more is built."""

    def __init__(self) -> None:
        self._weights: dict[tuple[int, int], list[weakref.ref[Tensor]]] = defaultdict(list)
        self.most: Counter[int] = Counter()
        """By layer, on any one rank."""

    def built(self, source: LayerSource, built: Built) -> None:
        for layer, (_, state) in built.items():
            known = self._weights[id(source), layer]
            known.append(weakref.ref(state.flats[0].weights))
            self.most[layer] = max(self.most[layer], sum(weight() is not None for weight in known))


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Alive:
    counting, build = Alive(), LayerSource._built

    def counted(source: LayerSource, *given: Any, on_host: bool = False, **more: Any) -> Built:
        built = build(source, *given, on_host=on_host, **more)
        if not on_host:
            counting.built(source, built)
        return built

    monkeypatch.setattr(LayerSource, "_built", counted)
    return counting


class Ranks:
    """Ranks that are threads, from generation to generation."""

    def __init__(self, config: WorkerConfig, count: int) -> None:
        self.ranks = [Rank(config, number, lambda report: None, secret=SECRET) for number in range(count)]
        self.generation = 0
        for rank in self.ranks:
            rank.setup()

    def assign(self, work: LaunchedJob, **given: Any) -> list[Assignment]:
        programs = place_programs(work.plan, (work.schedule,))
        return [
            Assignment(place=place, plan=work.plan, program=program, **given)
            for place, program in enumerate(programs)
        ]

    def follow(self, told: list[Assignment]) -> None:
        for rank, assignment in zip(self.ranks, told, strict=False):
            assert rank.follow(assignment) is None

    def train_one_step(self, size: int, request: Request = Request.REGROUP) -> int:
        """All train until the first commit, which carries the request; returns its step."""
        self.generation += 1
        hub, ended = Hub(size), list[Any]()
        generation = Generation(
            number=self.generation,
            epoch=1,
            members=tuple(range(size)),
            store_host="",
            store_port=0,
            timeout_s=60.0,
        )

        def train(place: int) -> None:
            rank = self.ranks[place]
            rank.join(generation, LocalChannel(hub, place))
            rank.request(request)
            ended.append(rank.train())

        threads = [threading.Thread(target=train, args=(place,)) for place in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [type(each) for each in ended] == [{Request.STOP: Outcome}.get(request, Parted)] * size
        return ended[0].step

    def finish_commit(self, step: int) -> tuple[StateSource, ...]:
        sources: list[StateSource] = []
        for rank in self.ranks:
            rank.finish_commit(CommitOutcome(step=step, vector=None, reported=step))
            at = rank.position()
            for piece in at.holds if at.step == step else ():
                sources.append(
                    StateSource(
                        layer=piece.layer, shard=piece.shard, rank=at.rank, host=at.host, port=at.port
                    )
                )
        return tuple(sources)

    def states(self) -> dict[int, LayerState]:
        return {layer: state for rank in self.ranks for layer, (_, state) in rank._holdings.layers.items()}


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ranks_of(config: WorkerConfig, count: int, closing: ExitStack) -> Ranks:
    made = Ranks(config, count)
    for rank in made.ranks:
        closing.callback(rank.close)
    return made


def test_a_rank_that_goes_back_lets_go_of_its_layers_first(
    tmp_path: Path, alive: Alive, closing: ExitStack
) -> None:
    config = small_config(tmp_path, "dropout", steps=9)
    one = job(config)
    here = ranks_of(config, 1, closing)
    here.follow(here.assign(one))
    assert here.train_one_step(1, Request.STOP) == 1
    (ref,) = checkpoints(config.job.folder)
    here.finish_commit(1)
    before = {layer: digest(state) for layer, state in here.states().items()}
    here.follow(here.assign(one, step=1, start=ref))
    assert alive.most == dict.fromkeys(LAYERS, 1)
    assert {layer: digest(state) for layer, state in here.states().items()} == before


@pytest.mark.parametrize("copies_in", ["host", "device"])
def test_a_layer_that_changes_ranks_is_on_each_device_once(
    tmp_path: Path, alive: Alive, closing: ExitStack, copies_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic = ElasticConfig(copies_in=copies_in)
    config = small_config(tmp_path, "dropout", steps=9, elastic=elastic)
    three = job(config, ranks=3, schedule="1f1b")
    three = LaunchedJob(config, with_standbys(three), three.schedule)
    two = job(config, ranks=2, schedule="1f1b")
    two = LaunchedJob(config, with_standbys(two), two.schedule)
    here = ranks_of(config, 3, closing)
    here.follow(here.assign(three))
    step = here.train_one_step(3)
    sources = here.finish_commit(step)
    before = {layer: digest(state) for layer, state in here.states().items()}
    copied, brought = list[int](), list[int]()
    refresh = HostCopy.refresh

    def counted(copy: HostCopy, *given: Any) -> bool:
        brought.append(copy.piece.layer)
        return refresh(copy, *given)

    def copies(state: LayerState) -> LayerState:
        copied.append(state.layer)
        return host_copy(state)

    monkeypatch.setattr(HostCopy, "refresh", counted)
    for module in (assembly, holdings):
        monkeypatch.setattr(module, "host_copy", copies)
    here.follow(here.assign(two, step=step, sources=sources))
    assert alive.most == dict.fromkeys(LAYERS, 1)
    after = {
        layer: digest(state) for rank in here.ranks[:2] for layer, (_, state) in rank._holdings.layers.items()
    }
    assert after == before
    # Rank 2 has live layers 6 and 7 and copies of 3, 4 and 5: of all that it offers, 3, 6 and 7 are fetched.
    assert (copied, brought) == ([], [3] if copies_in == "host" else [])


def test_copies_in_host_memory_are_brought_into_layers_that_were_built_beside_training(
    tmp_path: Path, alive: Alive, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, "dropout", steps=9, elastic=ElasticConfig(copies_in="host"))
    three, two = (job(config, ranks=count, schedule="1f1b") for count in (3, 2))
    # Places 0 and 1 have copies of what they will own.
    three = LaunchedJob(config, with_standbys(three, -1), three.schedule)
    here = ranks_of(config, 3, closing)
    here.follow(here.assign(three))
    step = here.train_one_step(3)
    sources = here.finish_commit(step)
    before = {layer: digest(state) for layer, state in here.states().items()}
    building = built_ahead(three.plan, (0, 1, 2), two.plan, (0, 1), on_host=True)
    assert building == {0: (Piece(3),), 1: (Piece(6), Piece(7))}
    for number, pieces in building.items():
        coming = here.ranks[number]._coming.modules
        coming.ready(pieces)
        while not coming.done:
            time.sleep(0.001)
    built, build = list[int](), LayerSource._built

    def counted(source: LayerSource, layers: Iterable[int], *given: Any, **more: Any) -> Built:
        made = build(source, layers, *given, **more)
        built.extend(made)
        return made

    monkeypatch.setattr(LayerSource, "_built", counted)
    here.follow(here.assign(two, step=step, sources=sources))
    assert built == [], "nothing is built while the ranks wait"
    assert alive.most == dict.fromkeys(LAYERS, 1)
    states = [state for rank in here.ranks[:2] for _, state in rank._holdings.layers.values()]
    assert {state.layer: digest(state) for state in states} == before


@pytest.mark.parametrize("copies_in", ["host", "device"])
def test_copies_are_to_be_had_before_the_ranks_have_trained_with_them(
    tmp_path: Path, closing: ExitStack, copies_in: Any
) -> None:
    config = small_config(tmp_path, steps=9, elastic=ElasticConfig(copies_in=copies_in))
    three = job(config, ranks=3, schedule="1f1b")
    plan = with_standbys(three)
    here = ranks_of(config, 3, closing)
    here.follow(here.assign(LaunchedJob(config, plan, three.schedule)))
    for place, rank in enumerate(here.ranks):
        assert {*rank.position().holds} == {*plan.pieces_of_place(place), *plan.copies_at(place)}
