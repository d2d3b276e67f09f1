"""Terminal output: lines of events, progress, tables of a job and of a plan.

Not here: pages (`orchestrator/report/`, `dashboard/pages/`).
"""
