"""A rank's place in the plan: where its layers come from when it joins, follows a plan or switches, and what it offers
to others.

Not here: how copies are kept (`workers/copies/`), the streams that carry layers (`workers/state_stream/`) and the
decisions (`orchestrator/lifecycle/`).
"""
