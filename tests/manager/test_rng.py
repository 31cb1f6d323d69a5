"""The states of the random number generators come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.manager.rng import RandomState
from shardckpt.mapping import ShardedObject
from tests import backends
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def own_generator() -> Iterator[None]:
    """Give NumPy its generator back."""
    before = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(before)


def _draw() -> list[float]:
    return np.random.standard_normal(3).tolist()  # type: ignore[no-any-return]  # noqa: NPY002 - the one that is saved


@backends.both  # numbers of more than 64 bits
@table("kind", [np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64])
@pytest.mark.filterwarnings("error")
def test_any_generator_of_numpy_comes_back(tmp_path: Path, kind: Any) -> None:
    """The numbers of NumPy after a load are those after the save, whatever bit generator the program has set."""
    np.random.set_bit_generator(kind(3))
    _draw()
    dc.save({"rng": ShardedObject("rng", RandomState().state_dict(), (1,), (0,))}, tmp_path / "c")
    expected = _draw()
    RandomState().load_state_dict(dc.load({"rng": ShardedObject("rng", None, (1,), (0,))}, tmp_path / "c")["rng"])
    assert _draw() == expected


@table("now", [np.random.PCG64, np.random.MT19937])
def test_a_state_of_another_generator_is_said(now: Any, caplog: pytest.LogCaptureFixture) -> None:
    """NumPy's generator stays where a program sets another one than the saved training did, and a warning says so."""
    before = np.random.MT19937 if now is np.random.PCG64 else np.random.PCG64
    np.random.set_bit_generator(before(3))
    state = RandomState().state_dict()
    np.random.set_bit_generator(now(4))
    RandomState().load_state_dict(state)
    assert f"generator is a {now.__name__} here, and the state is that of a {before.__name__}" in caplog.text
    assert np.random.get_bit_generator().state["bit_generator"] == now.__name__
