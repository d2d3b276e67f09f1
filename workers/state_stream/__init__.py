"""Layer state on its way from rank to rank: authenticated, chunked, and behind training traffic.

Not here: Who needs which layer (`workers/elastic/`).
"""
