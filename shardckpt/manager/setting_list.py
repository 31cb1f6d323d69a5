"""The settings of a CheckpointConfig, each with its default and its effect."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import ConfigurationError, name_known
from shardckpt.manager.config import CheckpointConfig
from shardckpt.manager.other_names import OTHER_NAMES, find_hint, list_our_names

if TYPE_CHECKING:
    from collections.abc import Sequence


class Setting(NamedTuple):
    """A setting of :class:`CheckpointConfig`.

    Attributes:
        name: Its name.
        default: Its default, as Python writes it.
        text: Its description.
    """

    name: str
    default: str
    text: str


def list_settings(names: Sequence[str] = ()) -> list[Setting]:
    """Return the settings of :class:`CheckpointConfig`, in its order.

    Args:
        names: The settings to return, by our names or another library's; by default all.

    Raises:
        ConfigurationError: There is no such setting.
    """
    fields, texts = CheckpointConfig.model_fields, _read_texts(inspect.getdoc(CheckpointConfig) or "")
    wanted = dict.fromkeys(ours for name in names for ours in list_our_names(name)) or fields
    for name in wanted:
        if name not in fields:
            hint, _ = find_hint((), name)
            known = f": {hint}" if hint else f" {name_known(name, fields, 'settings', also=OTHER_NAMES)}"
            raise ConfigurationError(f"there is no setting {name!r}{known}")
    defaults = CheckpointConfig().model_dump(mode="json")
    # without the marks of Sphinx: :class:`~a.b.KeepBest` is KeepBest
    plain = {name: re.sub(r":\w+:`[~\w.]*?(\w+)`|``", r"\1", text) for name, text in texts.items()}
    # Python -OO keeps no docstrings
    return [Setting(name, repr(defaults[name]), plain.get(name, "")) for name in wanted]


def _read_texts(doc: str) -> dict[str, str]:
    """Return the text of each attribute in a docstring, in one line."""
    texts: dict[str, str] = {}
    name = ""
    for line in doc.partition("Attributes:\n")[2].splitlines():
        if line.startswith("     ") and name:  # goes on with the text of the line before
            texts[name] += f" {line.strip()}"
        elif line.startswith("    ") and ": " in line:
            name, _, texts[name] = line.strip().partition(": ")
        elif line.strip():
            break
    return texts
