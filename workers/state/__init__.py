"""Layer state that training changes: its tensors, their layout and precision, and the rule that updates them. One
version of each.

Not here: the layer that computes with them (`workers/layers/layer.py`); where copies of them lie (`workers/elastic/`).
"""
