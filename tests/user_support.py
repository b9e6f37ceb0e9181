"""Files that a plain user may not touch, also where root runs the tests."""

import os
from contextlib import contextmanager


@contextmanager
def plain_user():
    """Without the rights of root, whom no mode of a file stops.

    Paths inside must be relative: the folders that pytest makes above the test's own are closed to others.
    """
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
