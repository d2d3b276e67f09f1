"""Checkpoints: layer files, the manifest, the background writer and the storage under them.

Not here: What the state of a layer is (`workers/state/layer_state.py`).
"""
