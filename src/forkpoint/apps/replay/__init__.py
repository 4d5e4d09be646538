"""Optimizer steps on recorded batches, shared and dense, with records of each step."""
