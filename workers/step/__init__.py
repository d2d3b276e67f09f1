"""One training step on one rank, from its plan to what it commits: the loop over steps (`training.py`), engine, stages,
minibatch, and what runs between steps.

Not here: the passes of a single layer (`workers/layers/`); what ranks agree on (`workers/commit/`).
"""
