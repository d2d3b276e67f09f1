"""Profiles as JSON: the same value back, and bad ones named."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_profile import DEVICE, layer, profile

from planner.profile import Cluster, LayerProfile, Link, Matrix, Profile, ProfileError

LINK = Link(latency_s=1e-4, bytes_per_s=1.5e9, sender_s=1e-5, receiver_s_per_byte=1e-10)
GOOD = profile(
    layer("embedding", input_grad_s=0.0, weight_grad_s=0.0, uncovered=("odd.weight",)),
    layer(
        "block", matrices=(Matrix(name="w", parameters=6, weight_grad_s=0.5, shape=(2, 3), scratch_bytes=24),)
    ),
    link=LINK,
    commit_s=0.01,
)


def changed(change: Callable[[dict[str, Any]], None]) -> str:
    data = json.loads(GOOD.to_json())
    change(data)
    return json.dumps(data)


def test_round_trip():
    assert Profile.from_json(GOOD.to_json()) == GOOD


@given(
    seconds=st.floats(0, 1e6),
    size=st.integers(0, 2**60),
    ranks=st.integers(1, 4),
    slowdown=st.floats(0.1, 10),
)
def test_round_trip_of_any_numbers(seconds: float, size: int, ranks: int, slowdown: float):
    sampled = profile(
        layer(forward_s=seconds, input_grad_s=seconds, activation_bytes=size),
        ranks=ranks,
        link=Link(latency_s=seconds, bytes_per_s=1.0 + seconds),
        device=replace(DEVICE, slowdown=slowdown, machine="m"),
    )
    assert Profile.from_json(sampled.to_json()) == sampled


def test_a_uniform_cluster_has_a_link_for_every_pair():
    cluster = Cluster.uniform(DEVICE, 3, LINK)
    assert cluster.link(0, 2) is cluster.link(2, 1) is LINK
    assert [cluster.links[rank][rank] for rank in range(3)] == [None] * 3
    assert LINK.transfer_s(15_000_000) == 0.0101


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"schema": 1}', changed(lambda d: d.update(schema=0))]
)
def test_no_json_or_another_schema(text: str):
    with pytest.raises(ProfileError, match=r"mine\.json (is not JSON|is not of schema)"):
        Profile.from_json(text, where="mine.json")


NUMBERS = [
    (section, field.name)
    for section, kind in (("layer", LayerProfile), ("link", Link))
    for field in fields(kind)
    if field.type in ("float", "int")
]


@pytest.mark.parametrize(("section", "name"), NUMBERS)
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "1", None, True, []])
def test_a_bad_number_is_named(section: str, name: str, value: Any):
    def change(data: dict[str, Any]) -> None:
        layers, links = data["model"]["layers"], data["cluster"]["links"]
        (layers[1] if section == "layer" else links[0][1])[name] = value

    place = "layer 1 (block)" if section == "layer" else "link 0 -> 1"
    with pytest.raises(ProfileError) as caught:
        Profile.from_json(changed(change))
    assert str(caught.value).startswith(f"the profile: {place}: {name} is {value}")


def put(path: tuple[Any, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (put(("cluster", "links", 1, 0, "bytes_per_s"), 0), "link 1 -> 0: bytes_per_s is 0"),
        (put(("cluster", "devices", 1, "memory_bytes"), 0), "device of rank 1: memory_bytes is 0"),
        (put(("cluster", "devices", 0, "slowdown"), 0.0), "device of rank 0: slowdown is 0.0;"),
        (put(("cluster", "commit_s"), -1.0), "cluster: commit_s is -1.0, below zero"),
        (put(("model", "threads"), 0), "model: threads is 0"),
        (put(("model", "layers", 1, "matrices", 0, "weight_grad_s"), -2), "matrix 0: weight_grad_s is -2"),
        (drop("model", "layers", 1, "forward_s"), "layer 1 (block) lacks forward_s"),
        (drop("model"), "the profile lacks model; make it with"),
        (drop("cluster", "devices"), "the profile: cluster lacks devices"),
        (drop("model", "precision"), "model lacks precision"),
        (drop("key"), "the profile lacks key"),
        (put(("model", "layers"), []), "model.layers is empty"),
        (put(("model", "layers", 0), 3), "layer 0 is no table of fields"),
        (
            put(("model", "layers", 1, "forward_ms"), 3),
            "layer 1 (block): unknown field forward_ms; it is none of",
        ),
        (put(("speed",), 3), "unknown field speed"),
        (put(("cluster", "links"), [[None]]), "one link per pair of its 2 devices"),
        (put(("cluster", "links", 0, 1), None), "link 0 -> 1 is no table of fields"),
        (put(("cluster", "links", 0, 1), 3), "link 0 -> 1 is no table of fields"),
        (put(("cluster", "links", 0, 0), LINK.__dict__), "link 0 -> 0 must be null"),
    ],
)
def test_what_is_wrong_is_named(change: Callable[[dict[str, Any]], None], problem: str):
    with pytest.raises(ProfileError) as caught:
        Profile.from_json(changed(change))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("section", "name"), [("layer", "forward_s"), ("layer", "parameters"), ("link", "latency_s")]
)
def test_a_whole_number_that_no_float_holds_is_named(section: str, name: str):
    def change(data: dict[str, Any]) -> None:
        layers, links = data["model"]["layers"], data["cluster"]["links"]
        (layers[1] if section == "layer" else links[0][1])[name] = 10**400

    with pytest.raises(ProfileError, match=rf"{name} is 10+…; a measured number is finite"):
        Profile.from_json(changed(change))


def test_settings_are_kept_and_may_be_left_out():
    with_settings = replace(
        GOOD, model=replace(GOOD.model, settings={"model.context": 64, "model.arguments": {"sizes": [1, 2]}})
    )
    assert Profile.from_json(with_settings.to_json()) == with_settings
    by_hand = json.loads(GOOD.to_json())
    del by_hand["model"]["settings"]
    assert Profile.from_json(json.dumps(by_hand)) == GOOD


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (put(("cluster", "devices"), []), "cluster.devices is empty"),
        (put(("model", "layers", 0, "name"), 7), "layer 0 (7): name is 7; it must be text"),
        (put(("model", "layers", 0, "matrices"), 7), "layer 0 (embedding): matrices is 7; it must be a list"),
        (put(("model", "layers", 1, "matrices"), [7]), "layer 1 (block): matrix 0 is no table of fields"),
        (put(("model", "layers", 1, "matrices", 0, "shape"), [2, 1.5]), "matrix 0: shape is 1.5"),
        (put(("model", "layers", 1, "matrices", 0, "shape"), 6), "matrix 0: shape is 6; it must be a list"),
        (
            put(("model", "layers", 0, "uncovered"), 7),
            "layer 0 (embedding): uncovered is 7; it must be a list",
        ),
        (put(("model", "layers", 0, "uncovered"), [7]), "uncovered is 7; it must be text"),
        (put(("source",), 7), "the profile: source is 7; it must be text"),
        (put(("model", "layers", 0, "activation_bytes"), 0.5), "activation_bytes is 0.5; it must be a whole"),
        (put(("model", "layers", 0, "parameters"), 1e300), "parameters is 1e+300; it must be a whole"),
        (
            put(("model", "settings"), ["model.heads"]),
            "model: settings is ['model.heads']; it must be a table",
        ),
    ],
)
def test_what_is_of_another_kind_is_named(change: Callable[[dict[str, Any]], None], problem: str):
    with pytest.raises(ProfileError) as caught:
        Profile.from_json(changed(change))
    assert problem in str(caught.value)


def test_what_a_message_holds_at_the_sender_on_the_link_and_at_the_receiver():
    link = Link(
        latency_s=9.0,
        bytes_per_s=4.0,
        sender_s=0.5,
        sender_s_per_byte=0.125,
        receiver_s=1.0,
        receiver_s_per_byte=0.25,
    )
    assert (link.sender_busy_s(16), link.link_busy_s(16), link.receiver_busy_s(16)) == (2.5, 4.0, 5.0)
    assert (link.sender_busy_s(16, 3), link.receiver_busy_s(16, 3)) == (3.5, 7.0)
    assert (link.transfer_s(16), link.total_s(16)) == (13.0, 20.5)
    other = Link(latency_s=1.0, bytes_per_s=2.0, sender_s=7.0)
    assert Link.slowest((link, other)) == Link(latency_s=9.0, bytes_per_s=2.0)
