"""Whole training steps, shared and dense."""
