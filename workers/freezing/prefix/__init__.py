"""Rules of the frozen prefix, a file each: how many layers, from the input up, each step freezes.

A rule reads what a commit tells of all layers, so every rank finds the same prefix on every partition.

Not here: what a layer below the prefix does (`workers/step/stage.py`).
"""
