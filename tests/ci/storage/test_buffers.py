"""Buffers: memory of one process."""

from __future__ import annotations

import os

from shardckpt.storage import buffers


def test_a_forked_child_has_blocks_of_its_own() -> None:
    """What a child of fork() writes into a block does not reach the parent's."""
    block = buffers.block_pool.acquire()
    block.view[:6] = b"parent"
    child = os.fork()
    if not child:
        block.view[:6] = b"child."
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(block.view[:6]) == b"parent"
    buffers.block_pool.release(block)
