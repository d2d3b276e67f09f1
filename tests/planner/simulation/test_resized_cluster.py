"""The measured cluster with another number of ranks."""

from dataclasses import replace

from small_profile import DEVICE

from planner.profile import Cluster, Link
from planner.simulation.resized_cluster import Sites, links_are_uniform, resized

NEAR, FAR = Link(latency_s=0.1, bytes_per_s=1e9), Link(latency_s=0.2, bytes_per_s=1e8)
SLOW_FAR = replace(FAR, bytes_per_s=1e6)


def measured(*machines: str) -> Cluster:
    devices = tuple(replace(DEVICE, machine=machine) for machine in machines)
    return Cluster(
        devices=devices,
        links=tuple(
            tuple(None if a == b else NEAR if one == other else FAR for b, other in enumerate(machines))
            for a, one in enumerate(machines)
        ),
        commit_s=0.5,
        receives_ahead=2,
    )


def test_domains_are_numbered_as_they_appear():
    assert Sites.of(["b", "a", "b", "c"]).domains == (0, 1, 0, 2)
    assert Sites.of([]).domains == ()


def test_zones_tell_sites_apart_and_stay_in_their_names():
    plain, zoned = Sites.of(["a", "b", "c"]), Sites.of(["y/a", "b", "x/c"], [2.0, None, None])
    assert plain.names == ("0", "1", "2")
    assert zoned.names == ("1/0", "1", "2/2")
    assert zoned.first(2).names == ("1/0", "1")
    assert Sites.of(["x/a", "x/b"]) == Sites.of(["y/a", "y/b"]) != Sites.of(["x/a", "y/b"])


def test_links_within_a_domain_are_those_within_a_machine():
    made = resized(measured("a", "a", "b", "b"), (0, 1, 1))
    assert made.links == ((None, FAR, FAR), (FAR, None, NEAR), (FAR, NEAR, None))
    assert (made.commit_s, made.receives_ahead) == (0.5, 2)
    assert not links_are_uniform(measured("a", "a", "b"))


def test_a_kind_of_link_without_a_measurement_equals_the_other():
    for machines, link in (("aaa", NEAR), ("abc", FAR)):
        made = resized(measured(*machines), (0, 1, 1))
        assert {found for row in made.links for found in row} == {None, link}
        assert links_are_uniform(measured(*machines))
    assert resized(measured("a"), (0, 1)).links == ((None, None), (None, None))


def test_the_median_link_and_device_and_the_least_memory_are_taken():
    cluster = measured("a", "b", "c")
    links = tuple(
        tuple(link if a != 0 or link is None else SLOW_FAR for link in row)
        for a, row in enumerate(cluster.links)
    )
    devices = tuple(
        replace(device, slowdown=slowdown, memory_bytes=memory)
        for device, slowdown, memory in zip(cluster.devices, (3.0, 1.0, 1.5), (10, 7, 8), strict=True)
    )
    made = resized(replace(cluster, links=links, devices=devices), (0, 1, 2, 3))
    assert {link for row in made.links for link in row} == {None, FAR}
    assert [(device.slowdown, device.memory_bytes) for device in made.devices] == [(1.5, 7)] * 4
