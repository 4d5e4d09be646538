"""Trainers of other libraries, which then compute every shared token once."""
