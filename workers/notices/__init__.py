"""How a node learns that it is about to go: files, SIGTERM and the metadata services of clouds.

Not here: Ray's drains (`orchestrator/controller/ranks/drains.py`).
"""
