"""Layers as built modules: their passes on single microbatches, deferred weight gradients, compiled forwards, the loss.

Not here: the order of passes (`workers/step/`); a layer's parameters, moments and buffers (`workers/state/`).
"""
