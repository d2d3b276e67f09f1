"""Pages in a real browser: headless Chromium, with no network."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from pace import patient

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")

needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")


@dataclass(frozen=True)
class Opened:
    """A page after its script has run."""

    dom: str
    console: list[str]
    """Its console output, including errors and violations of its policy."""

    @property
    def canvases(self) -> list[tuple[int, int]]:
        """(width, height) of every canvas."""
        return [(int(w), int(h)) for w, h in re.findall(r'<canvas width="(\d+)" height="(\d+)"', self.dom)]


def open_page(page: Path, profile: Path, *options: str, real_time: bool = False) -> Opened:
    """Open the file `page` with an empty browser profile in `profile`; all other requests fail.

    The page's clock jumps over waits; with `real_time` it does not, and the page is read when it has loaded.
    """
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--proxy-server=127.0.0.1:9",
            f"--user-data-dir={profile}",
            "--window-size=1240,2400",
            "--enable-logging=stderr",
            *([] if real_time else ["--virtual-time-budget=2000"]),
            *options,
            "--dump-dom",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    return Opened(done.stdout, re.findall(r".*CONSOLE.*", done.stderr))
