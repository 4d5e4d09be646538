"""Real optimizer steps on frozen batches, shared beside dense, recorded step by step.

`records`, `folder` and `trend` import no torch, so that a replay's folder can be read without it.
"""
