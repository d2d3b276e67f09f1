"""Tasks: how a row of a table becomes tokens and a label, and rows become a microbatch.

Not here: Where rows come from and lie (`workers/data/tables/`).
"""
