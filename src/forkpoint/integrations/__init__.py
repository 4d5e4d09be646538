"""Integrations: trainers of other libraries that train with forkpoint's steps."""
