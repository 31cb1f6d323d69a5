"""Program: kill a save that goes through an AsyncRequest at every file system call, as ``killer`` does a plain one.

It is executed in the foreground: strace counts the calls of every thread by itself.
"""

from __future__ import annotations

from shardckpt import dist_checkpointing
from tests.faults.killer import NEW, Killer, main, state_dict


class AsyncKiller(Killer):
    """Plans, stages, writes and finalizes, again and again, each time to another end."""

    def _change(self) -> None:
        overwrite = self._case != "fresh"
        state = state_dict(NEW)
        request = dist_checkpointing.save(state, self._target(), async_sharded_save=True, overwrite=overwrite)
        if request is None:
            raise SystemExit("no request")
        request.execute_sync()

    def _warm_up(self) -> None:
        super()._warm_up()
        state = state_dict(NEW)
        request = dist_checkpointing.save(state, self._folder / "warm", async_sharded_save=True, overwrite=True)
        if request is not None:
            request.execute_sync()


if __name__ == "__main__":
    main(AsyncKiller)
