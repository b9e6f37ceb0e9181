"""`python -m klformer.bench`, the same as `klformer bench`."""

import sys

from klformer.bench.command import main

if __name__ == "__main__":
    main(sys.argv[1:])
