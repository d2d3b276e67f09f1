"""Slots that processes share: whole, with their mark and their checksum, or not there."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from workers.activation_cache import cache_folders
from workers.activation_cache.cache_folders import ABANDONED_S, CacheFolders, left_behind
from workers.activation_cache.row_form import RowForm, rows_of
from workers.activation_cache.slot_files import MARK_BYTES, SlotFiles, Tier, taken_bytes
from workers.reproducibility.canonical import has_channels_last

ONE, OTHER = b"1" * MARK_BYTES, b"2" * MARK_BYTES
ROW = [memoryview(bytearray(range(200))), memoryview(bytearray(b"end"))]


def empty() -> list[memoryview]:
    return [memoryview(bytearray(part.nbytes)) for part in ROW]


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[SlotFiles]:
    found = SlotFiles([Tier(tmp_path, 10**6)], pytest.fail)
    yield found
    found.close()


def test_what_was_written_is_read_by_another_process_and_by_its_mark_alone(
    slots: SlotFiles, tmp_path: Path
) -> None:
    assert not slots.read(3, empty(), ONE)
    writer = multiprocessing.get_context("fork").Process(
        target=lambda: SlotFiles([Tier(tmp_path, 10**6)], print).write(3, ROW, ONE)
    )
    writer.start()
    writer.join()
    into = empty()
    assert slots.read(3, into, ONE)
    assert into == ROW
    assert not slots.read(3, into, OTHER)
    assert not slots.read(2, into, ONE)
    assert not slots.read(3, into[:1], ONE), "of another length"
    assert slots.write(3, ROW, OTHER)
    assert slots.read(3, into, OTHER)
    assert not slots.read(3, into, ONE)


def test_a_flipped_bit_anywhere_and_half_a_record_are_misses(slots: SlotFiles, tmp_path: Path) -> None:
    slots.write(1, ROW, ONE)
    (file,) = tmp_path.glob("*.slots")
    whole = file.read_bytes()
    length = int(file.stem) + 20
    for at in range(length, 2 * length):
        broken = bytearray(whole)
        broken[at] ^= 1 << at % 8
        file.write_bytes(broken)
        assert not slots.read(1, empty(), ONE), at
    for stop in range(length, 2 * length):
        file.write_bytes(whole[:stop])
        assert not slots.read(1, empty(), ONE), stop
    file.write_bytes(whole)
    assert slots.read(1, empty(), ONE)


def test_a_kill_in_the_middle_of_writing_leaves_whole_records_alone(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from workers.activation_cache.slot_files import SlotFiles, Tier\n"
        "slots = SlotFiles([Tier(pathlib.Path(sys.argv[1]), 2**30)], print)\n"
        "print('ready', flush=True)\n"
        "for turn in range(10**9):\n"
        "    data = bytes([turn % 251]) * 300_000\n"
        "    slots.write(turn % 4, [memoryview(data)], b'1' * 16)\n"
    )
    slots = SlotFiles([Tier(tmp_path, 2**30)], pytest.fail)
    found = 0
    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for number in range(4):
            into = bytearray(300_000)
            if slots.read(number, [memoryview(into)], ONE):
                found += 1
                assert len({*into}) == 1
    assert found
    slots.close()


def test_a_full_disk_is_a_miss_and_one_warning(tmp_path: Path) -> None:
    said: list[str] = []
    slots = SlotFiles([Tier(tmp_path, 10**9)], said.append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    slots.write(0, ROW, ONE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        assert not slots.write(10, ROW, ONE)
        assert not slots.write(11, ROW, ONE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert slots.read(0, empty(), ONE)
    assert not slots.read(10, empty(), ONE)
    (only,) = said
    assert only == (
        f"no more activations of frozen layers are kept in {tmp_path}: it is full. Those that are missing are computed"
    )
    slots.close()


def test_tiers_are_filled_one_after_the_other_within_their_bounds(tmp_path: Path) -> None:
    data = [memoryview(bytearray(os.urandom(8172)))]
    tiers = [Tier(tmp_path / name, 40_000) for name in ("memory", "disk")]
    for tier in tiers:
        tier.folder.mkdir()
    slots = SlotFiles(tiers, pytest.fail)
    room = [slots.write(number, data, ONE) for number in range(12)]
    assert 7 <= sum(room) <= 9
    assert all(taken_bytes(tier.folder) <= 40_000 for tier in tiers)
    assert slots.write(0, data, OTHER), "it has its slot"
    # Data of another length take the place of those.
    assert slots.write(0, [memoryview(bytearray(20_000))], ONE)
    assert [file.name for file in tiers[0].folder.iterdir()] == ["20000.slots"]
    slots.close()


def test_data_of_other_lengths_stay_that_are_needed_beside(tmp_path: Path) -> None:
    slots, other = (SlotFiles([Tier(tmp_path, 40_000)], pytest.fail) for _ in range(2))
    long, short = ([memoryview(bytearray(size))] for size in (20_000, 100))
    assert other.write(0, short, ONE)
    assert slots.taken_bytes() == other.taken_bytes() > 0, "whoever wrote them"
    assert slots.write(0, long, ONE)
    assert not slots.write(1, long, ONE, beside=(100,))
    assert slots.read(0, [memoryview(bytearray(100))], ONE)
    assert not slots.write(1, long, ONE)
    assert [file.name for file in tmp_path.iterdir()] == ["20000.slots"]
    assert other.write(7, short, ONE), "to a file that is there"
    assert slots.read(7, [memoryview(bytearray(100))], ONE)
    other.close()
    slots.close()


def test_closed_files_are_misses(slots: SlotFiles) -> None:
    assert slots.write(1, ROW, ONE)
    slots.close()
    assert not slots.read(1, empty(), ONE)
    assert not slots.write(1, ROW, ONE)


def test_files_that_are_none_are_misses(tmp_path: Path) -> None:
    said: list[str] = []
    slots = SlotFiles([Tier(tmp_path, 10**6)], said.append)
    (tmp_path / f"{sum(part.nbytes for part in ROW)}.slots").mkdir()
    (tmp_path / "ab.json").write_bytes(b"\xff\xfe")
    (tmp_path / "cd.json").mkdir()
    assert slots.noted("ab") is slots.noted("cd") is slots.noted("ef") is None
    slots.note("cd", "no room for it")
    assert not slots.read(1, empty(), ONE)
    assert not slots.write(1, ROW, ONE)
    (only,) = said
    assert "Is a directory" in only
    slots.close()


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.randn(3, 4, 5), torch.arange(6, dtype=torch.int64).reshape(3, 2)),
        (torch.randn(3, 4, 5).to(torch.bfloat16), torch.tensor([True, False, True])),
        (torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),),
        (torch.randn(3),),
    ],
)
def test_rows_of_a_microbatch_come_back_as_they_were(tensors: tuple[Tensor, ...]) -> None:
    form = RowForm.from_json(RowForm.of(tensors).to_json())
    assert form == RowForm.of(tensors)
    assert form.row_bytes == sum(tensor[0].nbytes for tensor in tensors)
    found = form.empty(3)
    for new, old in zip(rows_of(found), rows_of(tensors), strict=True):
        for into, part in zip(new, old, strict=True):
            into[:] = part
    for new, old in zip(found, tensors, strict=True):
        assert torch.equal(new, old)
        assert has_channels_last(new) == has_channels_last(old)
        assert new.stride() == old.stride()


@pytest.mark.parametrize("text", ["[", "3", "[[1]]", '[["os", [1], false]]', '[["float32", [-1], false]]'])
def test_a_form_that_is_none_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        RowForm.from_json(text)


def test_the_last_one_to_leave_removes_what_is_in_memory(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    places = [CacheFolders(str(tmp_path / "job"), None, memory=memory) for _ in range(2)]
    first, second = (place.open(pytest.fail) for place in places)
    assert [tier.folder for tier in first] == [tier.folder for tier in second]
    places[0].close()
    assert first[0].folder.exists()
    places[1].close()
    assert [*memory.iterdir()] == []
    assert first[1].folder.exists()
    places[0].remove()
    assert not first[1].folder.exists()


def test_what_a_kill_left_is_kept_for_its_job_and_removed_by_another_once_nobody_came_back(
    tmp_path: Path,
) -> None:
    left = CacheFolders(str(tmp_path / "killed"), None, memory=tmp_path)
    (tier, _) = left.open(pytest.fail)
    assert left._lock is not None
    os.close(left._lock)
    other = CacheFolders(str(tmp_path / "other"), None, memory=tmp_path)
    other.open(pytest.fail)
    assert tier.folder.exists()
    other.close()
    long_ago = time.time() - ABANDONED_S - 1
    os.utime(tier.folder / "lock", (long_ago, long_ago))
    again = CacheFolders(str(tmp_path / "killed"), None, memory=tmp_path)
    assert again.open(pytest.fail)[0].folder == tier.folder
    os.utime(tier.folder / "lock", (long_ago, long_ago))
    other.open(pytest.fail)
    assert tier.folder.exists(), "somebody uses it"
    assert again._lock is not None
    os.close(again._lock)
    other.close()
    other.open(pytest.fail)
    assert not tier.folder.exists()
    other.close()


def test_bounds_are_parts_of_what_would_be_free_without_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folders, "free_host_bytes", lambda: 80_000)
    places = [CacheFolders(str(tmp_path / "job"), None, memory=tmp_path) for _ in range(2)]
    tiers = places[0].open(pytest.fail)
    assert tiers[0].bound_bytes == 20_000, "as much memory is free, and more of the file system"
    slots = SlotFiles(tiers, pytest.fail)
    assert slots.write(0, ROW, ONE)
    slots.close()
    taken = taken_bytes(tiers[0].folder)
    assert taken > 0
    assert places[1].open(pytest.fail)[0].bound_bytes == (80_000 + taken) // 4
    for place in places:
        place.close()


@pytest.mark.parametrize(("job", "disk"), [("s3://bucket/run", None), ("file://{}/run", "run/activations")])
def test_a_job_whose_folder_is_an_address_has_files_where_that_is_one_of_this_host(
    tmp_path: Path, job: str, disk: str | None
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    place = CacheFolders(job.format(tmp_path), None, memory=memory)
    folders = [tier.folder for tier in place.open(pytest.fail)]
    assert folders[1:] == ([] if disk is None else [tmp_path / disk])
    place.close()
    place.remove()


def test_what_killed_ranks_of_a_job_left_is_removed_as_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folders, "MEMORY", tmp_path)
    place = CacheFolders(str(tmp_path / "job"), None)
    tier = place.open(pytest.fail)[0]
    assert left_behind(place.job), "a rank is still there"
    place.release()
    assert not left_behind(place.job)
    assert not tier.folder.exists()
    assert not left_behind("s3://bucket/run")


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    place = CacheFolders(str(tmp_path / "job"), None, memory=tmp_path)
    place._memory_folder.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    (tier,) = place.open(pytest.fail)
    assert tier.folder == tmp_path / "job" / "activations"
