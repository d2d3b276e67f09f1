"""Replicas that draw from parts of the samples: each sample once per pass of its part, whatever the sizes."""

from collections import Counter
from random import Random

import pytest
from drawn_samples import drawn_places

from orchestrator.spec.job_spec import JobConfig, Spec
from orchestrator.spec.rules import check
from planner.course import Course
from workers.config import DataConfig, PipelineConfig
from workers.data.buckets import Buckets
from workers.data.sampling import train_indices
from workers.protocol.errors import JobError


def of_replicas(stream: Buckets, steps: int, microbatches: int) -> dict[int, list[tuple[int, int]]]:
    """Replica -> (pass, sample) of each place, in order."""
    first = stream.course.legs[0]
    size, total = first.of_replica // microbatches, first.replicas * microbatches
    found: dict[int, list[tuple[int, int]]] = {replica: [] for replica in range(first.replicas)}
    for step in range(steps):
        for microbatch in range(total):
            places = drawn_places(7, step, microbatch, total, size, stream)
            found[microbatch // microbatches] += places
    return found


@pytest.mark.parametrize("seed", range(30))
def test_each_sample_of_a_part_is_drawn_once_in_each_pass(seed: int) -> None:
    draw = Random(seed)
    parts = draw.randint(1, 4)
    replicas, microbatches = parts * draw.randint(1, 3), draw.randint(1, 3)
    samples = draw.randint(parts, 40)
    stream = Buckets(samples, parts, Course.of(replicas, microbatches, draw.randint(1, 4)))
    steps = 3 * samples // stream.course.legs[0].of_replica + 2
    by_replica = of_replicas(stream, steps, microbatches)
    for part in range(parts):
        own = set(range(part * samples // parts, (part + 1) * samples // parts))
        places = [place for replica in range(part, replicas, parts) for place in by_replica[replica]]
        assert {sample for _, sample in places} <= own
        times = Counter(places)
        assert set(times.values()) == {1}, "no sample twice in a pass"
        passes = len(places) // len(own)
        for number in range(passes):
            assert {sample for of, sample in places if of == number} == own


def test_parts_have_orders_of_their_own_that_depend_on_the_seed() -> None:
    stream = Buckets(40, 2, Course.of(2, 1, 20))
    first, second = (train_indices(3, 0, replica, 2, 20, stream) for replica in (0, 1))
    assert sorted(first) == list(range(20))
    assert sorted(second) == list(range(20, 40))
    assert [sample + 20 for sample in first] != second
    assert train_indices(4, 0, 0, 2, 20, stream) != first


@pytest.mark.parametrize(
    ("data", "pipeline", "why"),
    [
        ({"buckets": 3}, {"ranks": 4, "replicas": 4}, r"a divisor of the replicas \(1, 2, 4\)"),
        (
            {"buckets": 2, "source": "table", "path": ["a", "b"], "weights": [1.0, 2.0]},
            {"ranks": 2, "replicas": 2},
            "mixed by weights are not parted",
        ),
    ],
)
def test_parts_that_cannot_be_are_refused(
    data: dict[str, object], pipeline: dict[str, object], why: str
) -> None:
    spec = Spec(
        job=JobConfig(name="a"),
        data=DataConfig.model_validate(data),
        pipeline=PipelineConfig.model_validate(pipeline),
    )
    with pytest.raises(JobError, match=why):
        check(spec)
