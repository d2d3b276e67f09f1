"""Commands on what a run left: its report, timelines, weights, proof, and its planner's decisions.

Not here: Commands that need a cluster.
"""
