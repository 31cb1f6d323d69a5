"""An author's claims for a strategy, and helpers of all parts of the contract."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from shardckpt.errors import ask_nearest
from shardckpt.testing.contract import jobs
from shardckpt.testing.contract.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.strategy import Migration

COMMON_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


class Claims:
    """The strategies under test, and the claims about them: class attributes that an author sets.

    Attributes:
        strategy: A registered strategy: a backend, ``"backend@version"`` or (backend, version). Or, in its place:
        save_strategy: The SaveStrategy: a class, an instance that can be pickled, or a function that returns one.
        load_strategy: The LoadStrategy, likewise.
        dtypes: The dtypes that it stores. A save of any other is refused, or right.
        names_oldest_reader: Whether the save strategy's ``reader`` names the oldest release that reads its version.
        supports_flattened_range: Whether it stores shards with a ``flattened_range`` (Megatron before 0.16).
        supports_shape_mismatch: Whether it loads shards with ``allow_shape_mismatch``.
        supports_objects: Whether it stores ShardedObjects.
        supports_python_values: Whether objects and common state may be any values that a load accepts: tuples, bytes,
            tensors. If not, they are JSON's types.
        supports_allowed_classes: Whether ``allow_globals`` lets objects have instances of other classes.
        supports_async: Whether it is an AsyncSaveStrategy that writes in a thread.
        supports_async_process: Whether its work can be written by another process, too.
        supports_urls: Whether it saves to object stores and loads from them.
        reads_only_requested: Whether a load reads little more than the shards that hold the requested boxes.
        max_stored_ratio: Bytes on disk for each byte of tensors, at most; None: not claimed.
        claims_safety: Whether a hostile checkpoint runs no code, opens nothing outside of its directory, and is an
            error of :mod:`shardckpt.errors`.
        removes_keys: Whether the load strategy has the method ``remove``.
        checks_files: Whether it has the methods ``list_files`` and ``check_files``.
        previous_save_strategy: A SaveStrategy of the version before, for the tests of ``migration``.
        migration: The Migration from that version to this one.
    """

    strategy: ClassVar[str | tuple[str, int] | None] = None
    save_strategy: ClassVar[Any] = None
    load_strategy: ClassVar[Any] = None
    dtypes: ClassVar[tuple[torch.dtype, ...]] = COMMON_DTYPES
    names_oldest_reader: ClassVar[bool] = True
    supports_flattened_range: ClassVar[bool] = True
    supports_shape_mismatch: ClassVar[bool] = True
    supports_objects: ClassVar[bool] = True
    supports_python_values: ClassVar[bool] = True
    supports_allowed_classes: ClassVar[bool] = True
    supports_async: ClassVar[bool] = False
    supports_async_process: ClassVar[bool] = False
    supports_urls: ClassVar[bool] = False
    reads_only_requested: ClassVar[bool] = True
    max_stored_ratio: ClassVar[float | None] = 1.5
    claims_safety: ClassVar[bool] = False
    removes_keys: ClassVar[bool] = False
    checks_files: ClassVar[bool] = False
    previous_save_strategy: ClassVar[Any] = None
    migration: ClassVar[type[Migration] | None] = None

    #: Where the promises are documented.
    contract_page: ClassVar[str] = "shardckpt/testing/README.md, 'A contract for your strategy'"

    def describe_subject(self) -> str:
        """Return the strategies as the report of a failure names them."""
        given = (self.get_claim("save_strategy"), self.get_claim("load_strategy"), self.get_claim("strategy"))
        return " with ".join(_name(one) for one in given if one is not None)

    @property
    def subject(self) -> Subject:
        """The strategies, as they are sent to ranks."""
        named = self.get_claim("strategy")
        with_objects = self.get_claim("supports_objects")
        return Subject(self.get_claim("save_strategy") or named, self.get_claim("load_strategy") or named, with_objects)

    def get_claim(self, name: str) -> Any:
        """Return a class attribute; a function is not bound to the test."""
        found = inspect.getattr_static(type(self), name)
        return found.__func__ if isinstance(found, staticmethod) else found

    def require(self, claim: str) -> None:
        """Skip the test unless the claim is made."""
        if not self.get_claim(claim):
            pytest.skip(f"not claimed: {claim} = {self.get_claim(claim)!r}")

    def require_counted_reads(self) -> None:
        """Skip the test unless it can count the bytes that a load reads, and these are claimed to be few."""
        self.require("reads_only_requested")
        if not Path("/proc/self/io").exists():
            pytest.skip("bytes that a process reads are counted by Linux only")

    def save_version(self, path: Path, value: int, **options: bool) -> None:
        """Save, by this process, a state dict that says a number everywhere."""
        jobs.save_version(self.subject, str(path), value, **options)

    def load_version(self, path: Path) -> dict[str, Any]:
        """Load the state that :meth:`save_version` saved."""
        return jobs.load_version(self.subject, str(path))

    def check_version(self, path: Path, value: int) -> None:
        """Check that a checkpoint is complete, and says the number everywhere."""
        jobs.check_version(self.load_version(path), value)

    @pytest.fixture(autouse=True)
    def _registered(self) -> Iterator[None]:
        if self.subject.save_strategy is None or self.subject.load_strategy is None:
            pytest.fail(f"{type(self).__name__} sets no strategy, or save_strategy and load_strategy", pytrace=False)
        for name, value in vars(type(self)).items():
            if name.startswith(("_", "test_")) or name in Claims.__annotations__ or callable(value):
                continue
            if question := ask_nearest(name, Claims.__annotations__):
                pytest.fail(
                    f"{type(self).__name__}.{name} is no claim, and nothing reads it: {question}", pytrace=False
                )
        self.subject.check_can_be_sent()
        with self.subject.registered():
            yield

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """The path that a test saves to: it does not exist, in a folder of its own."""
        folder = tmp_path / "checkpoints"
        folder.mkdir()
        return folder / "checkpoint"


def _name(strategy: Any) -> str:
    if isinstance(strategy, (str, tuple)):
        return repr(strategy)
    return str(getattr(strategy, "__qualname__", type(strategy).__qualname__))


def each(names: str | tuple[str, ...], values: Any) -> Callable[[Any], Any]:
    """Parametrize a test."""
    return pytest.mark.parametrize(names, values)
