"""Copies of layers that other ranks own: standbys on the device or in host memory, snapshots, and the updates and
parcels that keep them current.

Not here: who keeps which copy (`Plan.standbys`, `Plan.snapshots`); a copy that becomes a rank's own layer
(`workers/elastic/`).
"""
