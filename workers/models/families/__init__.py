"""Families of models: a family's fields in `[model]`, the builder of its layers, and what data it reads.

Not here: The union of all families (`workers/models/model_config.py`). Torch, before a model is built.
"""
