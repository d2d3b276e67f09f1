"""Models that Hugging Face's transformers defines, in layers: of its own modules, from a config.json and its weights.

Not here: the fields of `[model]` (`workers/models/families/huggingface.py`).
"""
