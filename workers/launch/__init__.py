"""Ranks without Ray: threads of a process, or processes of a forkserver.

Not here: Ranks as Ray actors (`workers/actor.py`).
"""
