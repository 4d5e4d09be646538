"""What a replay did, or what a file of rollouts would save, as one HTML page or as plots.

Imports neither torch nor, for the page, matplotlib.
"""
