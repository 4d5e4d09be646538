"""Reports of a replay, or of the savings on a file of rollouts: one HTML page, and plots.

Imports no torch. All but `text` and `verdict` need matplotlib, and `page` jinja2 as well:
`forkpoint[report]`.
"""
