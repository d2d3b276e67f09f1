"""Commit of each step by all ranks of a job: records, the decision that follows from them, and the state after it.

Not here: how a record's numbers are found (`workers/step/`, `workers/freezing/`).
"""
