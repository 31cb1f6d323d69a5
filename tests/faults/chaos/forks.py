"""The referee's processes as forks of this one, which has imported what they need: a start takes no 10 seconds."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from typing import IO, Any

from tests.faults.forks import Child


class Fork(Child):
    """A process that runs a module, as the referee starts it by ``subprocess.Popen``.

    Args:
        command: ``[python, "-m", module, *arguments]``.
        env: Its environment.
        stdout: Takes what it prints, errors included.
        more: What a fork does not need: ``cwd`` and ``stderr``.
    """

    def __init__(self, command: list[str], *, env: dict[str, str], stdout: IO[str], **more: Any) -> None:
        super().__init__(os.fork())
        if not self.pid:
            self._become(command[2], command[2:], env, stdout.fileno())

    @staticmethod
    def _become(module: str, argv: list[str], env: dict[str, str], output: int) -> None:
        code = 1
        try:
            os.setsid()
            os.environ.clear()
            os.environ.update(env)
            for number in (1, 2):
                os.dup2(output, number)
            sys.argv = argv
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else 1
        except BaseException:  # noqa: BLE001 - whatever it is, the fork must not go on as its parent
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
