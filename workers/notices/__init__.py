"""Notices that a node is about to go: from files, SIGTERM and the metadata services of clouds.

Not here: Ray's drains (`orchestrator/controller/ranks/drains.py`).
"""
