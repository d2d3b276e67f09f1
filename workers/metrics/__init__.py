"""Measures of a model on held-out samples, beside the loss: small statistics per sample, and numbers made of them all.

Not here: how validation runs (`workers/step/validation.py`), the names of the metrics (`workers/protocol/target.py`)
and what they end (`workers/protocol/goals.py`).
"""
