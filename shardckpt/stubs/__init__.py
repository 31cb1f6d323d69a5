"""Inert stubs for values of classes that a checkpoint names and that are not imported."""

from shardckpt.stubs.stub import Frozen, Stub, find_imported, make_stub_class

__all__ = ["Frozen", "Stub", "find_imported", "make_stub_class"]
