"""The Ray cluster: joining or starting it, where ranks go, and the processes that hold them.

Not here: What the ranks are told to do.
"""
