"""Rollouts: their fields, batches, constructors and files."""
