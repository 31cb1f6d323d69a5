"""The exit codes of every verb: one meaning each.

A fault that a verb was to find, in data that it could read, is a finding, however bad: ``verify`` of half a checkpoint
is :data:`FOUND`. If the work needs data that is missing or damaged, nothing is done, and that is :data:`FAILED`:
``convert`` of the same. A verb's help says which findings count for its :data:`FOUND`.

So a checkpoint of a format that nothing here reads is :data:`FOUND` of ``ls``, whose work is to say so, and
:data:`FAILED` of ``verify``, whose work is to read it. A folder without any checkpoint is :data:`FINE` of ``ls``, and
:data:`FAILED` of ``verify``, which has checked nothing.
"""

#: All is as it should be, or was done.
FINE = 0
#: The command did its work, and found something that is damaged, incomplete or different.
FOUND = 1
#: The command could not do its work, or was called wrongly (argparse's code).
FAILED = 2

#: The meanings, for the help of the command.
MEANINGS = (
    "Exit code: 0 if all is well or was done; 1 if something was found that is damaged, incomplete or different; "
    "2 after an error, which is printed to standard error, and for a wrong command line; 130 after Ctrl-C, unless the "
    "output was complete by then."
)
