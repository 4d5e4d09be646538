"""Operators on packed microbatches that read prefix cache of other microbatches; they know no
engine or host."""
