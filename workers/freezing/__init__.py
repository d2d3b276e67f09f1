"""Which parameters freeze in which microbatch: masks, ratios, stability checks and their tallies.

Not here: How much to freeze (`planner/freeze/`).
"""
