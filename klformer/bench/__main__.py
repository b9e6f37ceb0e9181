"""`python -m klformer.bench`: `klformer bench` without the benchmarks of higher layers."""

import sys

from klformer.bench.command import main

if __name__ == "__main__":
    main(sys.argv[1:])
