"""Commands that show running jobs and change nothing.

Not here: What a run left behind.
"""
