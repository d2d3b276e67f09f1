"""Models as lists of layer builders: the built-in families, a user's factory, losses and outlines.

Not here: How a layer runs (`workers/layers/layer.py`).
"""
