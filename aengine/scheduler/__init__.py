"""Who runs in a step, with how many tokens, on which pages; and what the outcome changes.

Owns requests from submission to release. Must not know torch, threads, streams or text: plans go down and results come up as
plain data (`plan.py`), updates go out as plain data (`request.py`).
"""
