"""Write a checkpoint as one file of ``torch.save`` with plain tensors and builtin containers, in bounded memory."""

from __future__ import annotations

import argparse
import enum
import io
import types
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.archive.checksums import clear_crcs, write_crcs
from shardckpt.archive.writer import DeclaredTensor, make_state_dict_frame
from shardckpt.engine.space import refuse_full
from shardckpt.errors import ShardingError
from shardckpt.huggingface.blocks import open_writer, write_blocks
from shardckpt.huggingface.header import FileLayout, FramePart, TensorSpan
from shardckpt.huggingface.small_file import replace_file
from shardckpt.tensors.memory import plain_cpu, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.huggingface.hub_tensor import HubTensor
    from shardckpt.storage.journal import Journal

#: What ``torch.load`` reads with ``weights_only``, in addition to tensors and containers.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device)
_CONTAINERS = (dict, list, tuple, set)
#: The builtin type that takes the place of a class derived from one.
_BUILTIN: dict[type[Any], Callable[[Any], Any]] = {
    **{kind: kind for kind in (*_CONTAINERS, bool, int, float, str, bytes)},
    frozenset: set,
    bytearray: bytes,
}
#: Advice about a value that a file does not hold.
_ADVICE = "leave it out (--leave-out), or convert to a format that stores objects"


@dataclass
class TorchFile:
    """A state dict that is to be written to a file of ``torch.save``.

    ``rewritten`` are the places of values that were of other classes than builtin ones, with the class.
    """

    tensors: Mapping[str, HubTensor]
    rewritten: dict[str, str] = field(default_factory=dict)
    #: Stand-ins for the tensors in the state dict, and for those that are in memory.
    _declared: dict[str, DeclaredTensor] = field(default_factory=dict)
    _in_memory: list[tuple[DeclaredTensor, torch.Tensor]] = field(default_factory=list)
    #: Containers that are being walked through, by identity.
    _open: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._declared = {name: DeclaredTensor(t.dtype, t.shape) for name, t in self.tensors.items()}

    @property
    def stand_ins(self) -> dict[str, Any]:
        """The stand-in for each tensor in the state dict that :meth:`write` takes, by name."""
        return dict(self._declared)

    def write(
        self,
        path: Path,
        state_dict: Any,
        checkpoint: OpenCheckpoint,
        journal: Journal | None = None,
        check: Callable[[Path], None] | None = None,
    ) -> None:
        """Write the file, and put it in the place of any other when it is durable.

        ``journal`` has what is written, if another process may go on with it after a kill. ``check`` gets the path of
        the durable file before it is put in its place; if it raises, the file is removed. A value of a class that has
        no builtin counterpart is a ShardingError.
        """
        plain = self._make_plain(state_dict, "")
        declared = [*self._declared.values(), *(stand_in for stand_in, _ in self._in_memory)]
        frame = make_state_dict_frame(plain, declared)
        parts = [FramePart(*part) for part in frame.parts]
        for start, (_, tensor) in zip(frame.starts[len(self.tensors) :], self._in_memory, strict=True):
            parts.append(FramePart(start, bytes(tensor_bytes(tensor))))
        spans = [
            TensorSpan(tensor, start, start + tensor.nbytes)
            for tensor, start in zip(self.tensors.values(), frame.starts, strict=False)
        ]
        with replace_file(path, journal) as staged:
            needed = sum(each.nbytes for each in declared) - (0 if journal is None else journal.nbytes)
            refuse_full(path, needed, "convert to")
            # a killed run may have written CRCs: files with digests in the journal have none
            clear_crcs(staged, frame.crcs)
            with open_writer(staged.parent, journal) as writer:
                write_blocks(writer, staged.name, FileLayout(sorted(parts), spans), checkpoint)
            write_crcs(staged, [*zip(frame.starts, (each.nbytes for each in declared), frame.crcs, strict=True)])
            if check is not None:
                check(staged)

    def _make_plain(self, value: Any, place: str) -> Any:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, DeclaredTensor):
            return value
        if isinstance(value, torch.Tensor):
            values = plain_cpu(value.detach()).contiguous()
            stand_in = DeclaredTensor(values.dtype, tuple(values.shape))
            self._in_memory.append((stand_in, values))
            return stand_in
        made = value
        if kind not in _CONTAINERS:
            made = _find_builtin(value)
            if made is value:
                raise ShardingError(
                    f"{place or 'the state dict'} is a {kind.__module__}.{kind.__qualname__}, which has no counterpart "
                    f"among the builtin types: {_ADVICE}"
                )
            self.rewritten[place] = f"{kind.__module__}.{kind.__qualname__}"
            if not isinstance(made, _CONTAINERS):
                return self._make_plain(made, place)
        if id(value) in self._open:
            raise ShardingError(f"{place} is a {kind.__qualname__} that holds itself: {_ADVICE}")
        self._open.add(id(value))
        try:
            if isinstance(made, dict):
                return self._make_dict(made, place)
            if isinstance(made, set):
                return set(self._make_dict(dict.fromkeys(made), place))
            return type(made)(self._make_plain(inner, _join(place, n)) for n, inner in enumerate(made))
        except RecursionError:
            raise ShardingError(f"{place.split('.', maxsplit=1)[0]} is nested too deep: {_ADVICE}") from None
        finally:
            self._open.remove(id(value))

    def _make_dict(self, value: dict[Any, Any], place: str) -> dict[Any, Any]:
        """Return a dict with keys, which may be elements of a set, and values of builtin types."""
        names: dict[Any, Any] = {}
        made = {}
        for key, inner in value.items():
            plain = self._make_plain(key, place)
            try:
                other = names.setdefault(plain, key)
            except TypeError:  # a frozenset, which becomes a set
                raise ShardingError(
                    f"{place or 'the state dict'} has {key!r:.80}, of which a file has a {type(plain).__name__}, which "
                    f"is no key and no element of a set: {_ADVICE}"
                ) from None
            if other is not key:
                raise ShardingError(
                    f"{place or 'the state dict'} has {other!r:.80} and {key!r:.80}, which a file both has as "
                    f"{plain!r:.80}: {_ADVICE}"
                )
            made[plain] = self._make_plain(inner, _join(place, key))
        return made


def _find_builtin(value: Any) -> Any:
    """Return the builtin counterpart of a value, which may have others in it; the value itself if there is none."""
    kind, made = type(value), value
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        made = dict(vars(value))
    elif isinstance(value, io.BytesIO):
        made = value.getvalue()
    elif isinstance(value, enum.Enum):
        made = value.value
    elif kind.__module__ == "numpy":  # by its name: numpy need not be installed
        if kind.__name__ == "ndarray":
            with suppress(TypeError):  # torch has no such dtype
                made = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
        elif hasattr(value, "item") and type(item := value.item()) is not kind:  # a long double is its own item
            made = item
    elif base := next((base for base in _BUILTIN if isinstance(value, base)), None):
        made = _BUILTIN[base](value)
    return made


def _join(place: str, name: Any) -> str:
    return f"{place}.{name}" if place else f"{name}"
