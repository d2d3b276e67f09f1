"""Models as lists of layer builders: the union of all families, what a user's factory returned, losses and outlines.

Not here: A family (`workers/models/families/`, a file each); how a layer runs (`workers/layers/layer.py`).
"""
