"""A model's parameters and buffers, described for a save or a load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.adapters.group_options import digest_names
from shardckpt.adapters.leaves import describe_leaf, describe_object
from shardckpt.adapters.modules import find_buffers, read_model
from shardckpt.adapters.own_values import find_own_values, request_own_values
from shardckpt.adapters.wrapper_params import describe_wrapper_param, find_wrapper_params, request_wrapper_params
from shardckpt.mapping.unstored import OptionalEntries
from shardckpt.validation.keys import VERSIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.nn import Module

    from shardckpt.adapters.dtensor import LayoutCache
    from shardckpt.adapters.leaf_shards import LeafShards
    from shardckpt.adapters.module_tree import StateColumns
    from shardckpt.mapping.base import Replicated, ShardedStateDict
    from shardckpt.mapping.unstored import StoredNames


class ModelTensors:
    """The current tensors of modules' state dicts.

    Args:
        dequantize: Whether the values of quantized parameters are stored, not the tensors inside them.
        kept: Describes tensors that are as in the last save; None for a load.
    """

    def __init__(
        self,
        parts: Sequence[Module],
        columns: Sequence[StateColumns | None],
        replicated: Replicated,
        *,
        dequantize: bool,
        kept: LeafShards | None,
    ) -> None:
        self._values, self._versions = read_model(parts, columns)
        self._replicated = replicated
        # buffers may differ between ranks (statistics of BatchNorm): any rank's will do
        self._buffers = find_buffers(self._values, parts) if replicated == "sampled" else frozenset()
        self._wrappers = {} if dequantize else find_wrapper_params(self._values)
        self._own = find_own_values(parts) if kept is None else None
        self._kept = kept

    def describe(self, prefix: str, cache: LayoutCache) -> ShardedStateDict:
        """Describe the tensors, and the versions of modules."""
        values, wrappers = self._values, self._wrappers
        plain = {name: value for name, value in values.items() if name not in wrappers} if wrappers else values
        if self._kept is not None:
            found = self._kept.describe(plain, prefix, self._replicated, self._buffers)
        else:
            found = {
                name: describe_leaf(value, f"{prefix}{name}", self._replication(name), cache=cache, detached=True)
                for name, value in plain.items()
            }
        if wrappers:
            inner = {
                name: describe_wrapper_param(f"{prefix}{name}", value, self._replication(name), cache)
                for name, value in wrappers.items()
            }
            found = {name: inner[name] if name in inner else found[name] for name in values}
        found.update(describe_versions(self._versions, prefix, self._replicated))
        if not wrappers and self._own is None:
            return found
        return OptionalEntries(
            found, prefix, lambda stored, entries: self._request(prefix, stored, entries), required=True
        )

    def _replication(self, name: str) -> Replicated:
        return "unchecked" if name in self._buffers else self._replicated

    def _request(self, prefix: str, stored: StoredNames, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request of a load."""
        found = request_wrapper_params(entries, self._wrappers, stored, prefix)
        return found if self._own is None else request_own_values(found, self._values, self._own, stored, prefix)


def describe_versions(parts: Sequence[Mapping[str, Any]], prefix: str, replicated: Replicated) -> dict[str, Any]:
    """Describe the versions of the modules of each part; a load asks for all that are stored, if there are any.

    The name of an object is a digest of its content: stages of a pipeline have modules of one name, such as the first.
    """
    own = {digest_names(f"{name} {version}" for name, version in each.items()): each for each in parts if each}
    if not own:
        return {}
    key = f"{prefix}{VERSIONS}."
    described = {digest: describe_object(each, f"{key}{digest}", replicated) for digest, each in own.items()}

    def request(stored: StoredNames, _: Mapping[str, Any]) -> dict[str, Any]:
        found = [each for each in stored.objects if each.startswith(key)]
        return {each.removeprefix(key): describe_object(None, each, "unchecked") for each in found}

    return {VERSIONS: OptionalEntries(described, key, request)}
