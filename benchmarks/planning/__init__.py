"""Batches, forests, plans and schedules common to ranks: the work before a step."""
