"""Whether plugins of other distributions are there, without ``importlib.metadata``, which takes 0.1 s."""

from __future__ import annotations

import os
import re
import sys

from shardckpt import settings

#: The section of plugins in a file of entry points; see :data:`shardckpt.plugins.hookspecs.GROUP`.
_SECTION = re.compile(rb"^\s*\[\s*shardckpt\s*\]", re.MULTILINE)
_FOLDERS = (".dist-info", ".egg-info", ".egg")


def has_foreign_plugins() -> bool:
    """Return whether a distribution other than this one may have plugins.

    True also where that cannot be said without ``importlib.metadata``: there are archives on ``sys.path``.
    """
    return bool(settings.plugins()) or any(map(_has_plugins, dict.fromkeys(sys.path)))


def _has_plugins(folder: str) -> bool:
    try:
        names = os.listdir(folder or ".")  # noqa: PTH208 - see below
    except NotADirectoryError:
        return True
    except OSError:
        return False
    # no pathlib: an object for each name would cost more than all else
    return any(
        _lists_plugins(f"{folder or '.'}/{name}") for name in names if name.endswith(_FOLDERS) and not _is_own(name)
    )


def _is_own(name: str) -> bool:
    return re.split(r"[-.]", name, maxsplit=1)[0].lower() == "shardckpt"


def _lists_plugins(folder: str) -> bool:
    return any(map(_has_section, (f"{folder}/entry_points.txt", f"{folder}/EGG-INFO/entry_points.txt")))


def _has_section(path: str) -> bool:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - see above
            return _SECTION.search(file.read()) is not None
    except OSError:
        return False
