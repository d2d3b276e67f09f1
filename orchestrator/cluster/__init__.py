"""The Ray cluster: joining or starting it, where ranks go, and their processes.

Not here: what the ranks do.
"""
