"""Choice of the parameters frozen in each microbatch: masks, ratios, stability checks and their tallies.

Not here: How much to freeze (`planner/freeze/`).
"""
