"""Modules that layers of the built-in families are made of.

Not here: The order of the layers and their sizes (`workers/models/families`).
"""
