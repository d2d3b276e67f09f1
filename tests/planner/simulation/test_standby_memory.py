"""What standbys take of devices and hosts, computed by hand."""

from dataclasses import replace

import pytest
from small_profile import DEVICE, layer, plan, profile

from planner.host_copies import PART
from planner.profile import Profile
from planner.schedule.registry import build
from planner.shards import Shard
from planner.simulation.gradient_communication import standby_update_s
from planner.simulation.predict import predict
from planner.simulation.snapshot_cost import COPIED_BYTES_PER_S
from planner.simulation.standby_memory import log_bytes, standby_bytes, standby_host_bytes

STATE, GRADIENTS = 40 + 80, 24
SIZES = {"gradient_bytes": GRADIENTS, "boundary_bytes": 0, "boundary_grad_bytes": 0}
CROSSED = plan(1, 2, standbys=((1,), (0,), (0,)))


def on(kind: str, every: int = 4) -> Profile:
    layers = [layer(name, **SIZES) for name in "abc"]
    return kept(profile(*layers, device=replace(DEVICE, kind=kind)), every)


def kept(made: Profile, every: int) -> Profile:
    return replace(made, cluster=replace(made.cluster, refresh_every=every))


def test_logs_take_as_much_as_copies_hold_whose_turn_comes_one_after_the_other() -> None:
    assert log_bytes([5], 4) == 4 * 5
    assert log_bytes([1, 1, 1], 3) == 1 + 2 + 3
    assert log_bytes([7, 1], 2) == 2 * 7 + 1
    assert log_bytes([1, 1, 1, 1], 3) == 3 + 1 + 2 + 3
    assert log_bytes([], 3) == 0


def test_on_the_host_a_standby_takes_a_base_the_next_one_and_a_log() -> None:
    bases = (1 * STATE + STATE, 2 * STATE + STATE)
    assert standby_host_bytes(on("cpu"), CROSSED) == (
        bases[1] + (4 + 3) * GRADIENTS,
        bases[0] + 4 * GRADIENTS,
    )
    assert standby_bytes(on("cpu"), CROSSED) == standby_host_bytes(on("cpu"), CROSSED)
    assert standby_host_bytes(on("cpu", 0), CROSSED) == (0, 0)


def test_of_a_gpu_standbys_on_the_host_take_one_layer_while_it_is_brought_up_to_date() -> None:
    pinned = 32
    assert standby_bytes(on("cuda"), CROSSED) == (STATE + 2 * GRADIENTS, STATE + 2 * GRADIENTS)
    assert standby_host_bytes(on("cuda"), CROSSED) == (3 * STATE + 7 * pinned, 2 * STATE + 4 * pinned)
    assert standby_bytes(on("cuda", 0), CROSSED) == (2 * (STATE + GRADIENTS), STATE + GRADIENTS)


def test_of_a_gpu_a_large_layer_takes_what_one_part_of_it_takes() -> None:
    count = 4 * PART
    large = layer("a", parameter_bytes=4 * count, gradient_bytes=4 * count, optimizer_bytes=8 * count)
    made = kept(profile(large, layer("b", **SIZES), device=replace(DEVICE, kind="cuda")), 4)
    crossed = plan(1, 1, standbys=((1,), (0,)))
    assert standby_bytes(made, crossed) == (STATE + 2 * GRADIENTS, 20 * PART)
    # What freezing looks at is the whole layer.
    looking = replace(
        made, model=replace(made.model, layers=(replace(large, statistics_bytes=1), layer("b")))
    )
    assert standby_bytes(looking, crossed)[1] == 20 * count + 1


def test_of_a_shard_standbys_take_its_part_and_its_owner_the_message() -> None:
    cut = plan(1, replicas=2, shard="optimizer", standbys=((1,), (0,)))
    made = kept(profile(layer("a", **SIZES), device=replace(DEVICE, kind="cuda")), 2)
    assert [piece.shard for piece in cut.pieces] == [Shard(0, 2), Shard(1, 2)]
    of_one = (GRADIENTS + 80) // 2 + 2 * GRADIENTS // 2
    assert standby_bytes(made, cut) == (of_one + GRADIENTS // 2,) * 2
    assert standby_host_bytes(made, cut) == (2 * (GRADIENTS + 80) // 2 + 2 * 16,) * 2


@pytest.mark.parametrize(
    ("kind", "on_device"), [("cuda", STATE + 2 * GRADIENTS), ("cpu", 3 * STATE + 7 * GRADIENTS)]
)
def test_a_plan_says_what_copies_take_of_a_host(kind: str, on_device: int) -> None:
    made = on(kind)
    found = predict(made, CROSSED, build("1f1b", 2, 2))
    assert found.redundancy.on_host
    assert found.redundancy.memory_bytes == max(standby_host_bytes(made, CROSSED))
    assert found.memory.ranks[0].peak.standbys == on_device
    assert found.redundancy.undone_steps == 0


def test_on_a_cpu_new_bases_take_time() -> None:
    updates = (2 * 0.5, 0.5)
    assert standby_update_s(on("cuda"), CROSSED) == updates
    assert standby_update_s(on("cpu", 0), CROSSED) == updates
    copied = (2 * STATE / COPIED_BYTES_PER_S / 2, STATE / COPIED_BYTES_PER_S / 2)
    longer = [update + more for update, more in zip(updates, copied, strict=True)]
    assert standby_update_s(on("cpu", 2), CROSSED) == pytest.approx(longer)
