"""`make bench` runs all benchmarks."""

from __future__ import annotations

from pathlib import Path

import benchmarks.__main__
from benchmarks.__main__ import BENCHMARKS


def test_every_benchmark_is_run() -> None:
    folder = Path(benchmarks.__main__.__file__).parent
    runnable = {path.stem for path in folder.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert runnable - {"__main__"} == set(BENCHMARKS)
