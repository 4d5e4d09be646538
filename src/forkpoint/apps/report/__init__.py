"""Reports of a replay, or of the savings on a file of rollouts: one HTML page, or plots.

Imports neither torch nor, for the page, matplotlib.
"""
