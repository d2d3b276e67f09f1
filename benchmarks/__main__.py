"""Runs the long soaks, then one benchmark after the other: `make bench`.

python -m benchmarks [NAME ...]
"""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = (
    "split_backward",
    "pipelining",
    "one_rank",
    "hugging_face",
    "hugging_face_pipelining",
    "lora",
    "packing",
    "loading",
    "real_weights",
    "image_tuning",
    "layer_parts",
    "one_gpu",
    "gpu_copies",
    "attention",
    "compiled",
    "prediction",
    "first_step",
    "partition",
    "planning_time",
    "on_paper",
    "repartition",
    "shrink",
    "monitoring",
    "telemetry",
    "freeze_program",
    "freezing",
    "freezing_tables",
    "prefix",
    "packed_pipelines",
    "activation_cache",
    "redundancy",
    "sharded",
    "copies",
    "adaptation",
    "forest_choices",
    "memory_relief",
    "shares",
    "come_and_go",
    "ordinary_noise",
    "migration",
    "migration_network",
    "redundancy_network",
    "rehearsal",
    "recovery",
    "planned_change",
    "double_losses",
    "trace_copies",
    "control_plane",
    "busy_machine",
    "soak",
    "takeover",
    "dashboard_load",
    "dashboard_pages",
    "dashboard_attacks",
)


def main() -> None:
    chosen = sys.argv[1:] or BENCHMARKS
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        raise SystemExit(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if not sys.argv[1:]:
        # pytest exits with 5 if no test carries the mark.
        soaks = subprocess.run([sys.executable, "-m", "pytest", "-m", "soak"], check=False)
        if soaks.returncode not in (0, 5):
            raise SystemExit(soaks.returncode)
    for name in chosen:
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()
