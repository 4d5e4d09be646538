"""Applications on top of the library: command line, replay, report."""
