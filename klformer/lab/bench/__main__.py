"""`python -m klformer.lab.bench`: one call in a process of its own, which `measure.in_own_process` has started.

It reads the function and its arguments from standard input, and writes what it gives to standard output.
"""

import pickle
import sys
from contextlib import redirect_stdout

from klformer.errors import UserError
from klformer.plugins import load_plugins

if __name__ == "__main__":
    try:
        load_plugins()  # those of the process that has started this one
        run, arguments = pickle.load(sys.stdin.buffer)
        with redirect_stdout(sys.stderr):
            found = run(*arguments)
        sys.stdout.buffer.write(pickle.dumps(found))
    except UserError as error:
        sys.exit(str(error))
