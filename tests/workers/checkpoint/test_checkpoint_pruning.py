"""Which checkpoints of a job are found, and which are deleted: only old ones of this job."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest
from saved_checkpoints import job_folder, saved, trained

from workers.checkpoint.folder import checkpoint_folder, checkpoints, discard, prune, write_layer


@pytest.fixture(params=["path", "uri"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return job_folder(request.param, tmp_path)


def test_newest_first_and_only_whole_ones(output: str, tmp_path: Path) -> None:
    for step, generation in ((20, 1), (100_000_000, 2), (40, 2), (40, 10), (40, 9)):
        saved(output, step, generation)
    write_layer(checkpoint_folder(output, 60, 2), trained(0, 60))
    parent = tmp_path / "run/checkpoints"
    (parent / "step-00000080-gen-x").mkdir()
    (parent / "step-00000090-gen-1").write_text("a file, not a folder")
    assert [Path(ref.path).name for ref in checkpoints(output)] == [
        "step-00000040-gen-10",
        "step-00000040-gen-9",
        "step-100000000-gen-2",
        "step-00000040-gen-2",
        "step-00000020-gen-1",
    ]


def test_prune_keeps_the_newest_and_what_is_not_ours(output: str, tmp_path: Path) -> None:
    for step in (20, 40, 60, 80):
        saved(output, step)
    write_layer(checkpoint_folder(output, 30, 1), trained(0, 30))  # abandoned
    write_layer(checkpoint_folder(output, 70, 1), trained(0, 70))  # abandoned, between complete ones
    write_layer(checkpoint_folder(output, 90, 1), trained(0, 90))  # being written
    parent = tmp_path / "run/checkpoints"
    foreign = [parent / "notes.txt", parent / "best-step-00000020-gen-1", tmp_path / "run/events.jsonl"]
    for path in foreign:
        path.write_text("mine")
    deleted = prune(output, keep=2)
    assert set(deleted) == {checkpoint_folder(output, step, 1) for step in (70, 40, 30, 20)}
    assert [ref.step for ref in checkpoints(output)] == [80, 60]
    assert {path.name for path in parent.iterdir() if path.is_dir()} == {
        "step-00000060-gen-1",
        "step-00000080-gen-1",
        "step-00000090-gen-1",
    }
    assert all(path.read_text() == "mine" for path in foreign)
    assert prune(output, keep=2) == ()


def test_prune_leaves_everything_while_none_is_whole(output: str, tmp_path: Path) -> None:
    assert prune(output, keep=1) == ()
    write_layer(checkpoint_folder(output, 30, 1), trained(0, 30))
    assert prune(output, keep=1) == ()
    assert (tmp_path / "run/checkpoints/step-00000030-gen-1").is_dir()


def test_discard_deletes_one_checkpoint(output: str) -> None:
    saved(output, 20)
    saved(output, 40)
    discard(checkpoint_folder(output, 40, 1))
    discard(checkpoint_folder(output, 60, 1))
    assert [ref.step for ref in checkpoints(output)] == [20]


def test_discard_while_others_write_into_it(output: str) -> None:
    """It raises no error. What is left is no checkpoint, and the next prune deletes it."""
    folder = checkpoint_folder(output, 20, 1)
    state = trained(0, 1)
    stop = threading.Event()

    def write_on() -> None:
        while not stop.is_set():
            with suppress(OSError):
                write_layer(folder, state)

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        for _ in range(1000):
            discard(folder)
    finally:
        stop.set()
        writer.join()
    assert checkpoints(output) == []
    saved(output, 40)
    prune(output, keep=1)
    assert not Path(folder.removeprefix("file://")).exists()


def test_a_checkpoint_that_was_left_behind_is_the_first_to_go(output: str) -> None:
    """Step 20 was damaged, so a later generation went on from step 10: its step 12 is the newest."""
    saved(output, 10, 1)
    saved(output, 20, 1)
    saved(output, 12, 2)
    assert [ref.step for ref in checkpoints(output)] == [12, 20, 10]
    prune(output, keep=1)
    assert [ref.step for ref in checkpoints(output)] == [12]
