"""Compares each layer, as training runs it, with stock autograd before the first step; refuses it by name.

Not here: What is covered by understanding (`workers/layers/deferred/cover.py`); the passes of a layer
(`workers/layers/layer.py`).
"""
