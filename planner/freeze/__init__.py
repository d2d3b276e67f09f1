"""How much to freeze: bounds from monitored steps, the linear program, and whether it pays.

Not here: Which parameters freeze (`workers/freezing/`).
"""
