"""The names in the dict of a ``torch.save`` archive, without torch: for a command that only lists the stored items."""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

from shardckpt.archive.opcodes import check_pickle
from shardckpt.archive.zip_directory import read_members
from shardckpt.errors import CheckpointingException

_STORAGES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Bool", "Short", "Int", "Long")
#: Globals that every load accepts. With any other, the reader of archives has to say whether a load accepts it.
_PLAIN = {
    ("collections", "OrderedDict"),
    ("argparse", "Namespace"),
    ("torch._utils", "_rebuild_tensor_v2"),
    *(("torch", f"{kind}Storage") for kind in _STORAGES),
}


class _Stub:
    """Takes the place of every instance, tensor and storage: it does nothing, whatever is done to it."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        """Take any arguments."""

    def __setstate__(self, _state: Any) -> None:
        """Take any state."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Take any item."""


class _NameReader(pickle.Unpickler):
    """Builds the dicts and lists of a pickle, with stubs for all else; it imports and calls nothing that is named."""

    def find_class(self, module: str, name: str) -> type[_Stub]:
        if (module, name) not in _PLAIN:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return _Stub

    def persistent_load(self, _pid: Any) -> _Stub:
        return _Stub()


def list_dict_names(data: bytes, source: str) -> list[str] | None:
    """Return the sorted names in the dict that an archive holds.

    None if it is something else, or has anything but plain values and tensors: :class:`Archive` reads that. The caller
    knows, by a digest, say, that a load accepts the archive.
    """
    try:
        members = read_members(lambda offset, nbytes: data[offset : offset + nbytes], len(data))
        (member,) = (member for name, member in members.items() if name.endswith("/data.pkl"))
        pickled = data[member.offset : member.offset + member.size]
        check_pickle(pickled, source)
        found = _NameReader(io.BytesIO(pickled)).load()
    except (CheckpointingException, pickle.UnpicklingError, struct.error, EOFError, RecursionError):
        return None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return sorted(found) if type(found) is dict and all(type(name) is str for name in found) else None
