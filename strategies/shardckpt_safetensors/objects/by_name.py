"""Members of enums, named tuples and stubs: a file names their class, which a load looks up and never imports."""

from __future__ import annotations

import enum
import re
from typing import Any

from shardckpt.stubs import Stub, find_imported, make_stub_class
from shardckpt_safetensors.objects.json_text import show

_ENUM, _NAMED_TUPLE, _STUB = "shardckpt.enum", "shardckpt.named_tuple", "shardckpt.stub"
#: The codecs of this module. No codec of a user has their names.
BY_NAME = frozenset((_ENUM, _NAMED_TUPLE, _STUB))
_MODULE, _CLASS = "module", "class"
#: A module, or a class in one, with dots.
_DOTTED = re.compile(r"(?=.{1,255}\Z)[^\W\d]\w*(\.[^\W\d]\w*)*")
#: The fields of a stub, and their classes.
_STUB_FIELDS = {"args": list, "kwargs": dict, "state": object, "items": dict, "values": list, "called": bool}
#: Most classes of stubs in one payload: each takes a kilobyte, however short its name is.
_MOST_CLASSES = 1024


def encode_by_name(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the codec of a value whose class a file can name, and its representation; None for others."""
    if isinstance(value, Stub):
        return _encode_stub(value)
    cls: Any = type(value)
    fields: dict[str, Any]
    if isinstance(value, enum.Enum):
        codec, fields = _ENUM, {"name": value.name, "value": value.value}
    elif _has_fields(cls, len(value) if isinstance(value, tuple) else -1) and not getattr(value, "__dict__", None):
        codec, fields = _NAMED_TUPLE, {"fields": dict(zip(cls._fields, value, strict=True))}
    else:
        return None
    module, name = cls.__module__, cls.__qualname__
    # a local class, or one whose name another has, could never be found
    if not _is_dotted(module) or not _is_dotted(name) or find_imported(module, name) is not cls:
        return None
    return codec, {_MODULE: module, _CLASS: name, **fields}


def _encode_stub(stub: Stub) -> tuple[str, dict[str, Any]]:
    held = vars(stub)
    module, name = stub.home
    if "name" in held:
        value = {"value": held["value"]} if "value" in held else {}
        return _ENUM, {_MODULE: module, _CLASS: name, "name": held["name"], **value}
    empty = {field for field, content in held.items() if type(content) in (tuple, list, dict) and not content}
    # an empty state is one: the class may make something of it
    fields = {field: held[field] for field in _STUB_FIELDS if field in held and field not in empty - {"state"}}
    return _STUB, {_MODULE: module, _CLASS: name, **fields, "args": list(stub.args)}


def decode_by_name(codec: str, fields: Any, made: set[type[Stub]]) -> Any:
    """Return a value: of its class if that is imported and has such a value, else a stub, whose class ``made`` gets.

    No function of the class is called but the lookup of a combination of flags. A malformed value is a ValueError.
    """
    if type(fields) is not dict or not (_is_dotted(fields.get(_MODULE)) and _is_dotted(fields.get(_CLASS))):
        raise ValueError(f"a malformed {codec}: {show(fields)}")
    module, name = fields.pop(_MODULE), fields.pop(_CLASS)
    _check_fields(codec, fields)
    found = _find_value(codec, find_imported(module, name), fields)
    if found is not None:
        return found
    stub_class = make_stub_class(module, name)
    made.add(stub_class)
    if len(made) > _MOST_CLASSES:
        raise ValueError(f"it has values of more than {_MOST_CLASSES} classes that are not imported")
    if codec == _ENUM:
        return stub_class.for_member(fields["name"], *([fields["value"]] if "value" in fields else ()))
    if codec == _NAMED_TUPLE:
        return stub_class(*fields["fields"].values())
    stub = stub_class(*fields.pop("args"), **fields.pop("kwargs", {}))
    vars(stub).update({"called": False, **fields})
    return stub


def _check_fields(codec: str, fields: dict[str, Any]) -> None:
    """Raise ValueError if a codec's fields are wrong."""
    if codec == _ENUM:
        fine = fields.keys() | {"value"} == {"name", "value"} and type(fields["name"]) in (str, type(None))
        fine = fine and (fields["name"] is not None or "value" in fields)
    elif codec == _NAMED_TUPLE:
        fine = fields.keys() == {"fields"} and type(fields["fields"]) is dict
        fine = fine and all(type(name) is str for name in fields["fields"])
    else:
        fine = "args" in fields and fields.keys() <= _STUB_FIELDS.keys()
        fine = fine and all(isinstance(value, _STUB_FIELDS[field]) for field, value in fields.items())
        fine = fine and all(type(name) is str for name in fields.get("kwargs", ()))
    if not fine:
        raise ValueError(f"a malformed {codec}: {sorted(map(str, fields))!r:.200}")


def _find_value(codec: str, cls: Any, fields: dict[str, Any]) -> Any:
    """Return the member or the named tuple, if the class that is imported under its name has such; else None."""
    if codec == _ENUM:
        return _find_member(cls, fields["name"], fields.get("value")) if isinstance(cls, enum.EnumMeta) else None
    if codec == _NAMED_TUPLE:
        values = fields["fields"]
        same = _has_fields(cls, len(values)) and cls._fields == tuple(values)
        return tuple.__new__(cls, values.values()) if same else None
    # the arguments of the pickle: the value of a member, or the fields
    args = fields["args"]
    if not fields.keys() <= {"args", "called"}:
        return None
    if isinstance(cls, enum.EnumMeta):
        members: list[Any] = list(cls)
        plain = len(args) == 1 and type(args[0]) in (bool, int, float, str)
        same_type = [member for member in members if plain and type(member.value) is type(args[0])]
        return next((member for member in same_type if member.value == args[0]), None)
    return tuple.__new__(cls, args) if _has_fields(cls, len(args)) else None


def _find_member(cls: Any, name: str | None, value: Any) -> Any:
    member = cls.__members__.get(name or "")
    if member is None and issubclass(cls, enum.Flag) and type(value) is int:
        try:
            return cls(value)
        except ValueError:
            return None
    return member


def _has_fields(cls: Any, count: int) -> bool:
    """Return whether a class makes named tuples with so many fields."""
    fields = getattr(cls, "_fields", None) if isinstance(cls, type) and issubclass(cls, tuple) else None
    return type(fields) is tuple and len(fields) == count


def _is_dotted(name: Any) -> bool:
    return type(name) is str and _DOTTED.fullmatch(name) is not None
