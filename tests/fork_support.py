"""Processes that are copies of one which has imported torch: importing takes longer than most of what they do."""

import os
import socket
import traceback


def forked(work, count):
    """Start `work(rank)` in copies of this process, which must not have computed a gradient: that would not survive."""
    children = []
    for rank in range(count):
        if (child := os.fork()) == 0:
            try:
                work(rank)
            except SystemExit as end:
                os._exit(int(end.code or 0))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return children


def codes_of(children):
    """What the processes end with."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_torchrun(work, world):
    """`work()` in several processes that know of each other as torchrun tells them."""
    port = free_port()

    def begin(rank):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(world)}
        work()

    return forked(begin, world)
