"""All contracts, for `from klformer.testing.contracts import *` in a test file."""

from klformer.testing.interface import *  # noqa: F403
from klformer.testing.numerics import *  # noqa: F403
