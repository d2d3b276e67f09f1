"""The papers' tables in small, each made by `freshet sweep`: speed, loss and accuracy of each way to freeze.

    python -m benchmarks.freezing_tables [TABLE ...] [--seeds N] [--out FOLDER] [--quick]

`language`, `texts` and `images` are TimelyFreeze's tables 1 to 3: each method under several schedules, on a GPT, a BERT
and a ViT that go on from trained weights. `transformer`, `transformer-texts` and `transformer-images` are
PipeTransformer's table 1 with three alphas: a ViT from scratch, whose pipeline shrinks and multiplies, and a BERT and a
ViT that go on from trained weights. `controls` is TimelyFreeze's figure 6: more and less freezing. A table
whose weights or texts are not there is left out, and says what makes them. The pages lie in the folder; the same
command goes on with what is not done. Figure 9 and table 4 of PipeTransformer: `benchmarks.packed_pipelines`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

METHODS = "none,apf,autofreeze,timelyfreeze,timelyfreeze+apf,timelyfreeze+autofreeze,auto"


@dataclass(frozen=True, kw_only=True)
class Table:
    """One sweep."""

    spec: str
    grid: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    needs: tuple[tuple[str, str], ...] = ()
    """(path that the spec reads, command that makes it)."""
    steps: int


FINETUNED = (
    (
        "runs/gpt.safetensors",
        "freshet train examples/gpt.toml; freshet export runs/gpt --out runs/gpt.safetensors",
    ),
)
REAL = (("runs/real/minilm", "make real-data"),)
SMALL = (("runs/small-vit", "python examples/small_vision.py"),)
ALPHAS = ("freeze.method=none,pipetransformer", "freeze.alpha=0.2,0.33,0.5")
SCHEDULES = "pipeline.schedule=gpipe,1f1b,zbv"
TABLES = {
    "language": Table(
        spec="examples/finetune.toml",
        grid=(SCHEDULES, f"freeze.method={METHODS}"),
        needs=FINETUNED,
        steps=150,
    ),
    "texts": Table(
        spec="examples/finetune-bert.toml",
        grid=("pipeline.schedule=1f1b,zbv", f"freeze.method={METHODS}"),
        needs=REAL,
        steps=150,
    ),
    "images": Table(
        spec="examples/finetune-vit.toml",
        grid=("pipeline.schedule=1f1b,zbv", f"freeze.method={METHODS}"),
        needs=SMALL,
        steps=300,
    ),
    "transformer": Table(
        spec="examples/vit.toml",
        grid=ALPHAS,
        overrides=("freeze.check_every=30",),
        steps=300,
    ),
    "transformer-texts": Table(
        spec="examples/finetune-bert.toml",
        grid=ALPHAS,
        overrides=("freeze.check_every=15",),
        needs=REAL,
        steps=150,
    ),
    "transformer-images": Table(
        spec="examples/finetune-vit.toml",
        grid=ALPHAS,
        overrides=("freeze.check_every=30",),
        needs=SMALL,
        steps=300,
    ),
    "controls": Table(
        spec="examples/finetune.toml",
        grid=("freeze.method=none,timelyfreeze", 'freeze.r_max=0.2,0.5,0.8,"auto"'),
        needs=FINETUNED,
        steps=150,
    ),
}


def make(name: str, seeds: int, folder: Path, *, quick: bool) -> None:
    """Run the sweep of a table, and print its CSV."""
    table = TABLES[name]
    for path, command in table.needs:
        if not Path(path).exists():
            print(f"{name}: left out, {path} is not there; it is made by {command}", flush=True)
            return
    steps = 30 if quick else table.steps
    out = folder / name
    words = [
        sys.executable,
        "-m",
        "orchestrator",
        "sweep",
        table.spec,
        "--out",
        str(out),
        "--seeds",
        str(seeds),
    ]
    words += [word for grid in table.grid for word in ("--grid", grid)]
    settings = (f"job.steps={steps}", f"job.validate_every={steps // 3}", *table.overrides)
    words += [word for each in settings for word in ("--set", each)]
    print(f"{name}: {' '.join(words[3:])}", flush=True)
    subprocess.run(words, check=True)
    print((out / "sweep.csv").read_text(encoding="utf-8"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; all if none is named"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/freezing-tables"))
    parser.add_argument(
        "--quick", action="store_true", help="30 steps each: shows that it works, not how well"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.tables if name not in TABLES]:
        parser.error(f"no table {', '.join(unknown)}; there are {', '.join(TABLES)}")
    for name in options.tables or TABLES:
        make(name, options.seeds, options.out, quick=options.quick)


if __name__ == "__main__":
    main()
