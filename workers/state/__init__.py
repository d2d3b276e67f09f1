"""Layer state that training changes: its tensors, their layout and precision, and the rule that updates them. There is
one version of a layer's weights (`flat.py`); more versions of a stage's weights would be kept here too.

Not here: the layer that computes with them (`workers/layers/layer.py`); copies for other ranks (`workers/copies/`).
"""
