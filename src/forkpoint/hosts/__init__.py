"""Models of libraries as hosts of microbatches; one package for each library."""
