"""Real optimizer steps on frozen batches, shared beside dense, recorded step by step."""
