"""Checkpoints: layer files, the manifest, the background writer and the storage under them; and weights to start from.

Not here: What the state of a layer is (`workers/state/layer_state.py`).
"""
