"""What all ranks of a job decide together after each step: records, the decision that follows from them, and the state
after it.

Not here: how a record's numbers are found (`workers/step/`, `workers/freezing/`).
"""
