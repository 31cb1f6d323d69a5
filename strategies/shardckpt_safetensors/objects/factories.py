"""The default factories of defaultdicts that a file may name: classes of Python whose empty values they make."""

from __future__ import annotations

from collections import OrderedDict

FACTORIES: dict[str, type] = {
    **{cls.__name__: cls for cls in (bool, bytes, dict, float, int, list, set, str, tuple)},
    "ordered_dict": OrderedDict,
}
FACTORY_NAMES = {cls: name for name, cls in FACTORIES.items()}
