"""The README and the guides: what they tell users to type, and the files that they show."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
SMALL = ("job.steps=2", "job.sample_tokens=0", "model.width=16", "model.context=16", "cluster.wait_s=240")
"""Makes the first job take about a second; `cluster.wait_s` allows for a busy machine."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that the first line names, as in `# my.toml`."""
        named = re.match(r"# ([\w-]+\.(?:toml|py))\n", self.text)
        return named and named.group(1)

    def __str__(self) -> str:
        return f"{self.page.stem}-{self.file or self.language}"


BLOCKS = [
    Block(page, language, text)
    for page in PAGES
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
]
LINES = [line for block in BLOCKS if block.language == "sh" for line in block.text.splitlines()]
TYPED = sorted({line.split("#")[0].strip() for line in LINES if line.startswith("freshet ")})


def write_files(folder: Path) -> None:
    """Write the files that the pages show, and the README that the first job reads."""
    for block in BLOCKS:
        if block.file:
            (folder / block.file).write_text(block.text)
    (folder / "README.md").write_text((ROOT / "README.md").read_text())
