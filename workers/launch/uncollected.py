"""Imported last by the process that forks ranks: excludes what it has imported from garbage collection.

Ranks inherit these hundreds of thousands of objects. Each full collection in a rank would visit them all, and so copy
the memory that the processes share: a tenth of a second each time. Nothing else may import this module.
"""

from __future__ import annotations

from workers.process.host_memory import exclude_from_collections

exclude_from_collections()
