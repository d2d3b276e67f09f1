"""Numbers derived from a run: predicted steps, idle time by cause, what freezing brings, effective training time.

Not here: How they look (`orchestrator/report/`, `orchestrator/pictures/`).
"""
