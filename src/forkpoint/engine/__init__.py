"""The executor of plans."""
