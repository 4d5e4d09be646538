"""Models of transformers: their entry, families, refusals and splits over ranks."""
