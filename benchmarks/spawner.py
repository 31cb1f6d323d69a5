"""A process that has imported what ranks need, and forks them: importing takes seconds, a fork milliseconds.

Run as ``python -m benchmarks.spawner DESCRIPTOR MODULE...``; the descriptor is a socket, over which come numbers of
ranks, each with the pipe that the rank answers to.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
from multiprocessing.connection import Connection

from benchmarks.rank import serve


def main() -> None:
    """Fork ranks until the runner closes the socket."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()
    while True:
        number, descriptors, *_ = socket.recv_fds(channel, 16, 1)
        if not number:
            return
        if os.fork() == 0:
            channel.close()
            os.setsid()  # to be ended with its children
            serve(int(number), Connection(descriptors[0]))
            return
        os.close(descriptors[0])


if __name__ == "__main__":
    main()
