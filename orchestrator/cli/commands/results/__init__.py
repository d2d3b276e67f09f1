"""Commands on what a run left: its report, timelines, weights and proof.

Not here: Commands that need a cluster.
"""
