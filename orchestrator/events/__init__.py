"""The job's event log: typed events, one JSON line each.

Not here: What a log adds up to (`orchestrator/history/`).
"""
