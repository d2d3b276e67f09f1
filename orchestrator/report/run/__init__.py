"""The sections of a run's page, each a function from a run to facts; the dashboard's page of a job shows them too.

Not here: the page itself (`orchestrator/report/page.py`), and how it looks (`orchestrator/report/templates/`).
"""
