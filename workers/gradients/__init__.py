"""Gradients up to the commit: parts of replicas kept apart, sums across ranks, and how they change.

Not here: how one is formed (`workers/layers/deferred/`); the buffers that they lie in (`workers/state/flat.py`).
"""
