"""`report.html`: one self-contained page about a job, made from its event log, and the profile beside it.

No script, no font, no file from elsewhere: styles and pictures are inline, and the page's own
Content-Security-Policy forbids the rest. Every value is escaped. The sections are in `sections.py`.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from html import escape
from pathlib import Path

from orchestrator.analysis.step_memory import profile_beside
from orchestrator.events.log import read_log
from orchestrator.history.job_view import JobView, fold
from orchestrator.report.facts import facts
from orchestrator.report.freezing import freezing
from orchestrator.report.moves import moves
from orchestrator.report.planning import planning
from orchestrator.report.recovery import recovery
from orchestrator.report.sections import charts, checkpoints, footer, header, notes, sample, spec, tiles
from orchestrator.report.style import STYLE
from orchestrator.report.timeline import timeline
from planner.profile import Profile

REPORT_NAME = "report.html"


def render(run: JobView, profile: Profile | None = None) -> str:
    """The page about `run`, as HTML.

    Args:
        profile: that the run was planned with: it tells of memory.
    """
    body = "\n".join(
        section
        for section in (
            header(run),
            notes(run),
            tiles(run),
            charts(run),
            recovery(run),
            moves(run),
            freezing(run),
            timeline(run, profile),
            planning(run),
            f'<div class="columns">{facts(run)}{checkpoints(run)}</div>',
            sample(run),
            spec(run),
            footer(run),
        )
        if section
    )
    styles = list(dict.fromkeys([STYLE, *re.findall(r"<style>(.*?)</style>", body, re.DOTALL)]))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(styles)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(run.job)} · Freshet report</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def policy(styles: list[str]) -> str:
    """The Content-Security-Policy of a page that needs these inline styles and nothing else."""
    digests = (base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() for style in styles)
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; style-src {sources}; base-uri 'none'; form-action 'none'"


def write_report(log: Path, destination: Path | None = None) -> Path:
    """Write the page about the event log `log`, by default beside it, and return its path. Where a profile lies beside
    the log, the page tells of memory, too.

    A reader sees the page before or the new one, never half of one.

    Raises:
        OSError: the log cannot be read or the page not be written.
        ValueError: the log is damaged; names the line.
    """
    destination = destination or log.with_name(REPORT_NAME)
    page = render(fold(read_log(log)), profile_beside(log))
    scratch = destination.with_name(f".{destination.name}.{os.getpid()}")
    try:
        scratch.write_text(page, encoding="utf-8")
        scratch.replace(destination)
    finally:
        scratch.unlink(missing_ok=True)
    return destination
