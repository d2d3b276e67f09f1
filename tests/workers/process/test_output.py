"""The output of a rank's process, which the job's folder keeps, and how the process's end shows in it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from pace import patient

from workers.process.output import (
    TAIL_BYTES,
    cause_of_death,
    innermost_calls,
    last_lines,
    older_part,
    rank_log_path,
)


def run(output: Path, code: str, *, most_bytes: int = 4096) -> Path:
    """Run `code` in a process that keeps its output as rank 3 of the job at `output`."""
    begin = f"from workers.process.output import keep_output; keep_output({str(output)!r}, 3, {most_bytes})\n"
    subprocess.run([sys.executable, "-c", begin + code], check=False, timeout=patient(60))
    return rank_log_path(str(output), 3)


def test_both_streams_come_in_order_and_only_of_the_newest_process(tmp_path: Path) -> None:
    run(tmp_path, "print('before')")
    path = run(
        tmp_path, "import os, sys; print('out'); print('err', file=sys.stderr); os.system('echo child')"
    )
    assert path == tmp_path / "logs" / "rank-3.log"
    assert last_lines(path) == ("out", "err", "child")
    assert last_lines(path, 1) == ("child",)
    assert "before" in path.read_text()
    assert cause_of_death(path) is None


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import ctypes; ctypes.string_at(0)", "signal SIGSEGV (segmentation fault)"),
        ("import os; os.abort()", "signal SIGABRT (aborted)"),
        ("import os; os._exit(7)", "exit code 7, by os._exit"),
    ],
)
def test_a_crash_names_its_cause_and_its_place(tmp_path: Path, code: str, cause: str) -> None:
    path = run(tmp_path, f"def forward():\n    {code}\nprint('in forward')\nforward()")
    assert cause_of_death(path) == cause
    assert last_lines(path)[0] == "in forward"
    assert any("forward" in line for line in last_lines(path)[1:])


def test_the_names_of_loaded_modules_are_no_last_words(tmp_path: Path) -> None:
    path = run(tmp_path, "import ctypes, torch\ntorch.zeros(1)\nctypes.string_at(0)")
    assert "Extension modules: " in path.read_text()
    assert not any("Extension modules: " in line for line in last_lines(path))


def test_other_threads_do_not_push_the_one_that_crashed_out(tmp_path: Path) -> None:
    threads = "import ctypes, threading, time\nfor _ in range(30): threading.Timer(9, print).start()"
    path = run(
        tmp_path,
        f"{threads}\ndef forward():\n    ctypes.string_at(0)\nthreading.Thread(target=forward).start()",
    )
    assert any("in forward" in line for line in last_lines(path))


def test_a_late_process_is_late_however_much_its_threads_print(tmp_path: Path) -> None:
    code = """
import faulthandler, threading, time
def a_call_with_a_rather_long_name(depth, wait):
    wait() if not depth else a_call_with_a_rather_long_name(depth - 1, wait)
def sleep():
    time.sleep(60)
def main():
    time.sleep(60)
for _ in range(20):
    threading.Thread(target=a_call_with_a_rather_long_name, args=(90, sleep), daemon=True).start()
faulthandler.dump_traceback_later(0.5, exit=True, file=2)
main()
"""
    path = run(tmp_path, code)
    calls = innermost_calls(path)
    assert path.stat().st_size > 2 * TAIL_BYTES
    assert calls.late
    assert "in main" in calls.lines[0]


def test_the_cause_is_not_that_of_a_process_before(tmp_path: Path) -> None:
    run(tmp_path, "import os; os._exit(7)")
    assert cause_of_death(run(tmp_path, "print('well')")) is None


def test_a_forked_child_may_exit_in_silence(tmp_path: Path) -> None:
    path = run(tmp_path, "import os\nif os.fork() == 0: os._exit(5)\nos.wait()")
    assert cause_of_death(path) is None


def test_output_is_bounded(tmp_path: Path) -> None:
    begun = time.monotonic()
    code = "import time\nfor i in range(40): print(i, 'x' * 500, flush=True); time.sleep(0.08)"
    path = run(tmp_path, code, most_bytes=8192)
    assert time.monotonic() - begun < patient(50)
    assert last_lines(path, 1)[0].startswith("39 x")
    assert older_part(path).exists()
    kept = path.stat().st_size + older_part(path).stat().st_size
    assert kept < 20 * 1024


def test_nothing_is_read_where_nothing_was_written(tmp_path: Path) -> None:
    path = rank_log_path(str(tmp_path), 0)
    assert last_lines(path) == ()
    assert cause_of_death(path) is None
    assert "://" not in str(rank_log_path("s3://bucket/job", 0))
