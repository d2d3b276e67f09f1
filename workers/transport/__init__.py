"""Training traffic: ordered streams between ranks and one all-gather, over threads, Gloo or NCCL.

Not here: State of layers (`workers/state_stream/`).
"""
