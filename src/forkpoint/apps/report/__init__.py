"""HTML pages of replays and of plans. Imports no torch.

All but `text` needs matplotlib and jinja2: `forkpoint[report]`.
"""
