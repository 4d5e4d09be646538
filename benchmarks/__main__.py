"""The command line of the benchmarks: `python -m benchmarks NAME`, in a checkout."""

import sys

from benchmarks.commands import main

if __name__ == "__main__":
    sys.exit(main())
