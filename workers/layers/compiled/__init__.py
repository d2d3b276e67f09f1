"""`job.compile`: layers as compiled functions, each compiled once per shape, with their weight gradients deferred.

Not here: How a deferred gradient is formed (`workers/layers/deferred/`), and the passes of a layer
(`workers/layers/layer.py`).
"""
