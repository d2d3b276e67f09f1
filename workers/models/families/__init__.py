"""Families of models: a family's fields in `[model]`, the builder of its layers, and what data it reads.

Not here: the union of all families (`workers/models/model_config.py`), nor torch before a model is built.
"""
