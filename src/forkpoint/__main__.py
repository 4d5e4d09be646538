"""`python -m forkpoint`: the command line."""

import sys

from forkpoint.apps.cli import main

if __name__ == "__main__":
    sys.exit(main())
