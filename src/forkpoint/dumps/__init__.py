"""Files of rollouts that trainers wrote, read within a memory limit and without running anything.

JSON lines, parquet, safetensors, pickles and torch files are decoded into records; a format makes
rollouts of the records of one trainer. `forkpoint.traces.open_rollouts` puts them together.
"""
