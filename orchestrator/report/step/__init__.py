"""One step on a page: measured, predicted or supposed, and its idle time by cause.

Not here: how a timeline is drawn (`orchestrator/pictures/`), and why ranks were idle (`orchestrator/analysis/`).
"""
