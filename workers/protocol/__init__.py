"""Values that every process may read: orders, reports, errors, what commits carry, goals, the base of sections.

Not here: how they travel (`workers/control/`), a spec's sections themselves (`workers/config.py`), and torch.
"""
