"""Measures of a model on held-out samples, beside the loss: small statistics per sample, and numbers made of them all.

Not here: How validation runs (`workers/step/validation.py`).
"""
