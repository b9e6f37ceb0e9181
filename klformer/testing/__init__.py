"""What every attention must do, as tests for pytest: a new one is tested by being registered.

In a test file of your own, import your module, which registers your attentions, and then all contracts:

    import my_module
    from klformer.testing.contracts import *

pytest then runs every contract for every attention that is registered; `-k mine` runs those of yours.

The small problems of the contracts are there as well:

    >>> from klformer.testing.problems import build, operands
    >>> attention = build("gmm-rks")
    >>> q, k, v = operands()
    >>> attention(q, k, v).shape[:3] == q.shape[:3]
    True
"""
