"""What training changes of a layer: its tensors, how they lie, in which precision, and the rule that updates them.

Not here: the layer that computes with them (`workers/layers/layer.py`); where copies of them lie (`workers/elastic/`).
"""
