"""Architectures of transformers, a file each: the modules of each layer, and where their tensors lie in the model.

Not here: how a class is found, and how a layer gets its values (`workers/models/huggingface/definition.py`).
"""
