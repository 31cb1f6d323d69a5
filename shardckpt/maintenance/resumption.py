"""What identifies a conversion: another one of the same identity writes the same bytes."""

from __future__ import annotations

import hashlib
import importlib.metadata

import torch

from shardckpt import settings
from shardckpt.storage import digest_vote


def make_identity(*facts: object) -> str:
    """Return a digest of what is converted and how, and of the releases and settings that the bytes depend on."""
    versions = importlib.metadata.version("shardckpt"), torch.__version__, digest_vote(), settings.io_threads()
    return hashlib.sha256(repr((versions, facts)).encode()).hexdigest()
