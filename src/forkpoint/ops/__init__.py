"""Operators on packed microbatches that read prefix caches of other microbatches. They do not
depend on engine or hosts."""
