"""Another plan for the ranks that train: boundaries and device order for their present speeds (DynPipe, Algorithm 2).

`repartition.py` has the one function that others call, `best`.

Not here: Whether a change pays (`planner/adapt/policy.py`), and plans for other ranks (`planner/search/replan.py`).
"""
