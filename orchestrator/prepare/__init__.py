"""Before step 0: measure, plan and settle a spec, take over what a resumed run decided.

Not here: The programs that plan (`planner/`).
"""
