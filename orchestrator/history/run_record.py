"""The names that pages import a `JobView` by."""

from __future__ import annotations

from orchestrator.history.job_view import MONITORING, JobView, Note, fold

__all__ = ["MONITORING", "Note", "RunRecord", "fold"]

RunRecord = JobView
