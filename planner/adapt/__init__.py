"""What is known of each rank's speed while a job trains, and when another cut pays for itself.

`detection.py` finds slow ranks, `policy.py` decides.

Not here: The search for the cut (`planner/search/recut.py`), and moving the layers.
"""
