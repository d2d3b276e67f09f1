"""The course of a batch: each position once, whatever the legs; with one leg it is what a constant batch is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.codec import from_json, to_json
from planner.course import Course, Leg, times_as_many
from workers.data.buckets import Buckets
from workers.data.sampling import train_places

PARTS = 2


@st.composite
def courses(draw: st.DrawFn) -> Course:
    """Up to four legs whose replicas are multiples of those of the first, which two parts divide."""
    replicas = PARTS * draw(st.integers(1, 2))
    course = Course.of(replicas, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    step = 1
    for _ in range(draw(st.integers(0, 3))):
        step += draw(st.integers(1, 4))
        course = course.grown(
            step, draw(st.integers(1, 8)), draw(st.sampled_from(["constant", "linear", "sqrt"]))
        )
    return course


@settings(deadline=None)
@given(courses(), st.integers(1, 60))
def test_steps_take_one_position_after_the_other(course: Course, steps: int) -> None:
    taken: list[int] = []
    for step in range(1, steps + 1):
        leg = course.at(step)
        assert len(taken) == course.taken(step - 1)
        for microbatch in range(leg.replicas * leg.microbatches):
            positions = course.positions(step, microbatch)
            taken += positions
            for offset, position in enumerate(positions):
                turn = course.turn(position)
                assert turn.begun == course.taken(step - 1)
                assert turn.replica == microbatch // leg.microbatches
                assert turn.offset == microbatch % leg.microbatches * leg.microbatch_size + offset
    assert taken == [*range(course.taken(steps))]


@settings(deadline=None)
@given(courses(), st.integers(1, 400))
def test_a_job_ends_with_the_step_that_takes_its_last_sample(course: Course, samples: int) -> None:
    last = course.steps(samples)
    assert course.taken(last - 1) < samples <= course.taken(last)
    first = course.legs[0].batch
    assert course.last_step(samples) == course.steps(samples * first)


@settings(deadline=None, max_examples=60)
@given(courses(), st.integers(PARTS, 40), st.integers(1, PARTS), st.integers(0, 5))
def test_each_sample_comes_once_in_each_epoch_in_any_course_with_buckets_too(
    course: Course, samples: int, parts: int, seed: int
) -> None:
    stream = samples if parts == 1 else Buckets(samples, parts, course)
    steps = course.steps(3 * samples)
    drawn: dict[int, list[tuple[int, int]]] = {part: [] for part in range(parts)}
    for step in range(1, steps + 1):
        leg = course.at(step)
        for microbatch in range(leg.replicas * leg.microbatches):
            part = microbatch // leg.microbatches % parts
            drawn[part] += train_places(seed, course.positions(step, microbatch), stream)
    for part, places in drawn.items():
        own = set(range(part * samples // parts, (part + 1) * samples // parts))
        assert len(places) == course.taken(steps) // parts
        assert len({*places}) == len(places), "a sample twice in an epoch"
        epochs = len(places) // len(own)
        for epoch in range(epochs):
            assert {sample for of, sample in places if of == epoch} == own
        assert {sample for of, sample in places if of == epochs} <= own


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 50), st.integers(1, 99))
def test_one_leg_is_a_constant_batch(
    replicas: int, microbatches: int, size: int, step: int, samples: int
) -> None:
    course, total = Course.of(replicas, microbatches, size), replicas * microbatches
    for microbatch in range(total):
        first = (step * total + microbatch) * size
        assert course.positions(step + 1, microbatch) == range(first, first + size)
    assert course.taken(step) == step * total * size
    assert course.last_step(step + 1) == step + 1
    assert course.epoch(step + 1, samples) == ((step + 1) * total * size - 1) // samples
    along = course.along(step)
    assert along == step
    assert type(along) is int


def test_the_replicas_follow_what_the_layers_that_are_left_cost() -> None:
    # PipeTransformer with 12 layers and lambda 1/6: 8 frozen ones leave 4 + 8/6, which twice over is less than 12.
    assert [times_as_many(12, frozen, 1 / 6) for frozen in range(12)] == [1] * 8 + [2] * 3 + [4]
    assert times_as_many(12, 6, 0.0) == 2
    assert times_as_many(12, 11, 0.0) == 8
    assert times_as_many(12, 11, 1.0) == 1


def test_the_rate_is_a_factor_by_how_much_the_batch_has_grown() -> None:
    course = Course.of(2, 2, 3)
    factors = [course.grown(5, 4, lr).legs[-1].lr_factor for lr in ("constant", "linear", "sqrt")]
    assert factors == [1.0, 4.0, 2.0]
    grown = course.grown(5, 4, "linear")
    # 4 steps of 12 samples, then steps of 48.
    assert [grown.along(steps) for steps in (3, 4, 5, 6)] == [3, 4, 8, 12]
    assert replace(grown.legs[1], replicas=3) == Leg(
        step=5, sample=48, replicas=3, microbatches=2, microbatch_size=3, lr_factor=4.0
    )


def test_legs_that_do_not_follow_on_are_refused() -> None:
    course = Course.of(1, 2, 2).grown(4, 2, "constant")
    for wrong in (replace(course.legs[1], sample=13), replace(course.legs[1], step=1)):
        with pytest.raises(ValueError, match="steps must rise, and no sample be left out or taken twice"):
            Course.of(1, 2, 2, [wrong])
    with pytest.raises(ValueError, match="it is to begin with step 1 at sample 0"):
        Course((course.legs[1],))


def test_a_leg_is_read_as_it_was_written() -> None:
    leg = Course.of(1, 2, 2).grown(4, 2, "sqrt").legs[1]
    assert from_json(Leg, to_json(leg)) == leg
    assert json.loads(to_json(leg))["sample"] == 12
