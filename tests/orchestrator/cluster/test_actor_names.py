"""One module makes and parses actor names."""

from __future__ import annotations

import pytest

from orchestrator.cluster.actor_names import JobActors, jobs_among, rank_name, ranks_among, split_name


@pytest.mark.parametrize("job", ["a", "a-b", "rank-1", "a/rank-x"])
def test_a_name_is_read_as_it_was_made(job: str) -> None:
    assert split_name(rank_name(job, 12)) == (job, 12)
    assert split_name(job) == (job, None)


def test_actors_are_put_to_their_jobs() -> None:
    names = ["b/rank-3", "a", "a/rank-0", "a/rank-10", "ab/rank-1", "ab"]
    assert jobs_among(names) == {
        "a": JobActors(True, frozenset({0, 10})),
        "ab": JobActors(True, frozenset({1})),
        "b": JobActors(False, frozenset({3})),
    }
    assert ranks_among("a", names) == {0, 10}
    assert ranks_among("c", names) == frozenset()
