"""Numbers derived from a run: predicted steps, what freezing brings, effective training time.

Not here: How they look (`orchestrator/report/`, `orchestrator/pictures/`).
"""
