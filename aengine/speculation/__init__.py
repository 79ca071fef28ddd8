"""Drafters: what proposes tokens that may follow those of a sequence. The model then samples at all of their positions in one step
(target verify), so a draft decides only how fast an output comes.
"""
