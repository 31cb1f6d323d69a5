"""What the tests of group failure share."""

from __future__ import annotations

DIED = (
    " died or left the process group: a collective of {} ranks failed in 'meeting', and connections were closed. Look "
    "in the logs of the program and of the kernel (dmesg) for an exception, a signal, or too little memory; a "
    "rank that ended without one has not made this call, which all ranks make"
)

STOPPED = (
    " did not answer within {:g} s: a collective of {} ranks failed in 'meeting'. Check with py-spy whether the "
    "process is stopped, hangs, or was busy for longer than the process group's timeout"
)
