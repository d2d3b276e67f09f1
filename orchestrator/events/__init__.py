"""The job's event log: typed events, one JSON line each, with the level and the sentence that people read of it.

Not here: the state that a log adds up to (`orchestrator/history/`).
"""
