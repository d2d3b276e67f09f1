"""Gradients up to the commit: the sinks that take them as they are formed, sums across ranks, and how they change.

Not here: how one is formed (`workers/layers/deferred/`); the buffers that they lie in (`workers/state/flat.py`).
"""
