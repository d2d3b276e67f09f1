"""What a rank's Ray actor adds to the rank: errors that travel, and a check of the job's folder."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from workers.actor import check_folder
from workers.control.rank_error import RankError, travelling_errors
from workers.protocol.errors import ChannelError, JobError


def raised(error: BaseException, *, cut_off: bool = False) -> RankError:
    with pytest.raises(RankError) as caught, travelling_errors(cut_off=cut_off):
        raise error
    back = pickle.loads(pickle.dumps(caught.value))
    assert vars(back) == vars(caught.value)
    return back


def test_a_users_error_travels_as_its_own_words() -> None:
    error = raised(JobError("no such file"))
    assert (str(error), error.user_error, error.cut_off, error.details) == ("no such file", True, False, "")


def test_a_users_error_with_a_cause_brings_its_traceback() -> None:
    error = JobError("the forward pass of layer l3 raised ValueError: odd")
    error.__cause__ = ValueError("odd")
    travelled = raised(error)
    assert travelled.user_error
    assert "ValueError: odd" in travelled.details


def test_any_other_error_brings_its_traceback() -> None:
    error = raised(ValueError("odd"))
    assert (str(error), error.user_error, error.cut_off) == ("ValueError: odd", False, False)
    assert "test_actor.py" in error.details


def test_a_layer_that_exits_is_a_users_error() -> None:
    error = raised(SystemExit(3))
    assert str(error) == "the job's code called sys.exit(3): raise an exception where something is wrong"
    assert error.user_error
    assert "test_actor.py" in error.details


def test_a_lost_neighbour_is_no_cause() -> None:
    assert raised(ChannelError("rank 1 is gone")).cut_off
    assert raised(RuntimeError("connection refused"), cut_off=True).cut_off


def test_the_controller_reads_such_errors_without_torch() -> None:
    text = pickle.dumps(raised(ValueError("odd"))).hex()
    code = f"import pickle, sys; pickle.loads(bytes.fromhex('{text}')); sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_a_node_sees_the_folder_by_its_marker(tmp_path: Path) -> None:
    marker = ("job.json", b"this start")
    with pytest.raises(JobError, match=r"node 10\.0\.0\.7 does not see the job's folder"):
        check_folder(str(tmp_path), marker, "10.0.0.7")
    (tmp_path / "job.json").write_bytes(b"another")
    with pytest.raises(JobError, match="file system that all nodes share"):
        check_folder(str(tmp_path), marker, "10.0.0.7")
    (tmp_path / "job.json").write_bytes(b"this start")
    check_folder(str(tmp_path), marker, "10.0.0.7")
