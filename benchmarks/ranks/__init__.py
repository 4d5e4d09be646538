"""Whole training steps of several ranks."""
