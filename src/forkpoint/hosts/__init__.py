"""How a model family is entered: one module a library."""
