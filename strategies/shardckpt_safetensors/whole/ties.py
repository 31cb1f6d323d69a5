"""Tied tensors among the whole ones: an output layer that is the embedding is stored once, under the embedding's name.

``save_pretrained`` of transformers leaves ``lm_head.weight`` out then, and what opens the folder makes it of the
embedding, because ``config.json`` says ``tie_word_embeddings``. Of other tied tensors no file of the folder says that
they are tied: each is stored, or a tool would start with random values for the name that is not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.chunks import agree_on_aliases, find_ties
from shardckpt.huggingface import HEADS, find_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.distributed import Comm
    from shardckpt.mapping import ShardedBase
    from shardckpt_safetensors.whole.layout import Cut
    from shardckpt_safetensors.whole.options import WholeOptions

#: The keys of a rank that share their memory, as :func:`shardckpt.chunks.find_ties` returns them.
Ties = list[tuple[str, ...]]


def find_whole_ties(shards: Sequence[ShardedBase], options: WholeOptions) -> Ties:
    """Return the keys of whole tensors that share their memory on this rank; none if each key is to be stored.

    Args:
        shards: The rank's shards of whole tensors.
        options: Say whether tied tensors are stored once.

    Returns:
        Groups of two keys and more, each in the order of the alphabet.
    """
    return find_ties(shards) if options.store_aliases else []


def find_tied_head(
    shards: Sequence[ShardedBase], ties: Ties, cuts: Mapping[str, Sequence[Cut]], options: WholeOptions, comm: Comm
) -> dict[str, str]:
    """Collective: return the output layer's key, and the key by which it is stored, if the folder need not have both.

    Args:
        shards: This rank's shards of whole tensors.
        ties: What :func:`find_whole_ties` has returned for them.
        cuts: What each tensor becomes in the folder, by key.
        options: Name the folder's ``config.json``.
        comm: The ranks.

    Returns:
        One key at most, the same on all ranks; none if no ``config.json`` is there, or it does not say that.
    """
    aliases = agree_on_aliases(ties, shards, comm)
    tied = {*aliases, *aliases.values()}
    head = next((key for key in sorted(tied) if len(cuts[key]) == 1 and cuts[key][0].written.name in HEADS), None)
    if head is None:
        return {}
    stored = aliases.get(head, head)
    others = sorted(key for key in {stored, *aliases} - {head} if aliases.get(key, key) == stored)
    is_tied = comm.main_runs("reading the assets", lambda: _says_tied(options))
    return {head: others[0]} if is_tied else {}


def _says_tied(options: WholeOptions) -> bool:
    """Return whether the folder's config.json says that the output layer is the embedding."""
    config = find_config(options.assets)
    return config is not None and config.is_tied
