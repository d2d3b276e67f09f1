"""Writing in the background, on disks that are really full and in processes that are really killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import workers
from workers.checkpoint.folder import (
    checkpoint_folder,
    checkpoints,
    read_layer,
    read_manifest,
    write_manifest,
)
from workers.checkpoint.manifest import FileRecord, Manifest
from workers.checkpoint.writer import CheckpointWriter
from workers.state.layer_state import LayerState, digest

ROOT = Path(workers.__file__).parent.parent


def states(layers: int, numbers: int, fill: float = 1.0) -> list[LayerState]:
    """`layers` layers of `numbers` float32 weights each."""
    return [
        LayerState(layer, f"l{layer}", {"w": torch.full((numbers,), fill)}, {}, {"w": {}}, {"w": 1})
        for layer in range(layers)
    ]


def finish(folder: str, step: int, records: tuple[FileRecord, ...]) -> None:
    """Write the manifest, as the first rank does."""
    layers = tuple(f"l{layer}" for layer in range(len(records) // 2))
    files = {record.name: record for record in records}
    write_manifest(
        folder, Manifest(step=step, generation=1, spec={}, plan={}, layers=layers, samples=0, files=files)
    )


class Gated(list[LayerState]):
    """States that are available up to a given one, and the rest once the gate opens."""

    def __init__(self, given: list[LayerState], before_gate: int) -> None:
        super().__init__(given)
        self.before_gate = before_gate
        self.reached, self.gate = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[LayerState]:
        for position, state in enumerate(super().__iter__()):
            if position == self.before_gate:
                self.reached.set()
                self.gate.wait()
            yield state


def test_one_write_at_a_time_in_the_background(tmp_path: Path) -> None:
    folder = checkpoint_folder(str(tmp_path), 20, 1)
    writer = CheckpointWriter()
    assert writer.poll() is None
    assert writer.wait() is None
    gated = Gated(states(3, 100), before_gate=1)
    assert writer.start(folder, 20, gated)
    assert gated.reached.wait(timeout=60)
    assert writer.poll() is None
    assert not writer.start(checkpoint_folder(str(tmp_path), 40, 1), 40, states(3, 100))
    gated.gate.set()
    result = writer.wait()
    assert result is not None
    assert (result.folder, result.step, result.error) == (folder, 20, None)
    assert [record.name for record in result.records] == [
        f"00{layer}-l{layer}.{kind}.safetensors" for layer in range(3) for kind in ("weights", "state")
    ]
    assert result.bytes == sum(file.stat().st_size for file in Path(folder).iterdir())
    assert result.seconds > 0
    assert writer.poll() is None
    assert checkpoints(str(tmp_path)) == []
    finish(folder, 20, result.records)
    (ref,) = checkpoints(str(tmp_path))
    assert digest(read_layer(ref, read_manifest(ref), 2)) == digest(states(3, 100)[2])

    # A result that nobody has read yet holds back the next write, so that no result is lost.
    assert writer.start(folder, 21, states(1, 1))
    writer.close()
    assert not writer.start(folder, 22, states(1, 1))
    result = writer.poll()
    assert result is not None
    assert result.step == 21
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_an_error_is_a_result_and_leaves_what_others_wrote(tmp_path: Path) -> None:
    folder = Path(checkpoint_folder(str(tmp_path), 20, 1))
    (folder / "001-l1.weights.safetensors" / "in the way").mkdir(parents=True)
    (folder / "007-other.weights.safetensors").write_bytes(b"of another rank")
    writer = CheckpointWriter()
    assert writer.start(str(folder), 20, states(3, 10))
    result = writer.wait()
    assert result is not None
    assert (result.records, result.bytes, result.error) == ((), 0, "Is a directory")
    assert {entry.name for entry in folder.iterdir()} == {
        "001-l1.weights.safetensors",
        "007-other.weights.safetensors",
    }
    assert writer.start(checkpoint_folder(str(tmp_path), 40, 1), 40, states(3, 10))
    again = writer.wait()
    assert again is not None
    assert again.error is None
    writer.close()


def run(code: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start `code` in a separate interpreter, with this module's names."""
    preamble = "import sys; sys.path.insert(0, sys.argv[1]); from test_checkpoint_writer import *\n"
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", preamble + code, str(Path(__file__).parent), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


FILL_THE_DISK = """
output, how = sys.argv[2:4]
if how == "tmpfs":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "freshet-test", output], check=True)
else:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
writer = CheckpointWriter()
first, second, third = (checkpoint_folder(output, step, 1) for step in (20, 40, 60))
writer.start(first, 20, states(3, 20_000, fill=20.0))
finish(first, 20, writer.wait().records)
# Small layers first: files that are already whole have to go as well.
writer.start(second, 40, states(2, 50_000) + [states(3, 500_000)[2]])
failed = writer.wait()
left = os.listdir(second)
(ref,) = checkpoints(output)
kept = [digest(read_layer(ref, read_manifest(ref), layer)) for layer in range(3)]
writer.start(third, 60, states(3, 20_000, fill=60.0))
finish(third, 60, writer.wait().records)
writer.close()
print(json.dumps({
    "error": failed.error, "records": len(failed.records), "left": left, "kept": kept,
    "steps": [ref.step for ref in checkpoints(output)],
}))
"""


def assert_the_old_one_stayed(child: subprocess.Popen[str], error: str) -> None:
    printed, complaints = child.communicate(timeout=120)
    assert child.returncode == 0, complaints
    told = json.loads(printed)
    assert told["error"] == error
    assert told["records"] == 0
    assert told["left"] == []
    assert told["kept"] == [digest(state) for state in states(3, 20_000, fill=20.0)]
    assert told["steps"] == [60, 20]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """The test mounts a file system of 1 MiB in a namespace that ends with the process."""
    for prefix in (("unshare", "--mount"), ("unshare", "--map-root-user", "--mount")):
        mount = ("mount", "-t", "tmpfs", "freshet-test", str(tmp_path))
        try:
            mounts = subprocess.run([*prefix, *mount], capture_output=True).returncode == 0
        except FileNotFoundError:
            mounts = False
        if mounts:
            child = run(FILL_THE_DISK, str(tmp_path), "tmpfs", prefix=prefix)
            assert_the_old_one_stayed(child, "No space left on device")
            assert list(tmp_path.iterdir()) == []
            return
    pytest.skip("no file system can be mounted here; the test with a file size limit stands in")


def test_a_file_size_limit_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    assert_the_old_one_stayed(run(FILL_THE_DISK, str(tmp_path), "limit"), "File too large")


DIE_WRITING = """
output, prefix = sys.argv[2], int(sys.argv[3])
writer = CheckpointWriter()
first, second = (checkpoint_folder(output, step, 1) for step in (20, 40))
writer.start(first, 20, states(4, 1000, fill=20.0), prefix)
finish(first, 20, writer.wait().records)
gated = Gated(states(4, 1000), before_gate=2)
writer.start(second, 40, gated, prefix)
gated.reached.wait()
print("midway", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("frozen", [0, 3])
def test_kill_9_while_writing_leaves_the_old_checkpoint(frozen: int, tmp_path: Path) -> None:
    child = run(DIE_WRITING, str(tmp_path), str(frozen))
    assert child.stdout is not None
    assert child.stdout.readline() == "midway\n"
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    second = checkpoint_folder(str(tmp_path), 40, 1)
    if not frozen:
        assert len(os.listdir(second)) == 2 * 2
    (ref,) = checkpoints(str(tmp_path))
    assert ref.step == 20
    read = read_manifest(ref)
    expected = states(4, 1000, fill=20.0)
    assert [digest(read_layer(ref, read, layer)) for layer in range(4)] == [digest(s) for s in expected]
    # Another process begins again, and takes what is there.
    writer = CheckpointWriter()
    writer.start(second, 40, states(4, 1000), frozen)
    result = writer.wait()
    assert result is not None
    finish(second, 40, result.records)
    writer.close()
    (ref, _) = checkpoints(str(tmp_path))
    read = read_manifest(ref)
    assert [digest(read_layer(ref, read, layer)) for layer in range(4)] == [
        digest(s) for s in states(4, 1000)
    ]
