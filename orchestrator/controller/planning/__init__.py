"""Planning for a running job: the replanner in force, plans made ahead, and the planner's process.

Not here: how another plan is found (`planner/search/replan.py`), and when one is worth it (`planner/adapt/`).
"""
