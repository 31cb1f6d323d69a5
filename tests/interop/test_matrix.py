"""Everyone who saves by everyone who loads: the sample at 4 ranks, loaded at 1, 2 and 4, every value compared.

No release of megatron-core is left out for a dtype: all save and load native float8, bool and complex as they are.
What releases cannot do is in ``writers.py``: shards of unequal size, which they then replicate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop import here, plain_dcp
from tests.interop.runner import MegatronError
from tests.interop.writers import WRITERS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.interop.runner import Megatron
    from tests.ranks import RankPool

    Releases = Callable[[str], Megatron]
    Saved = Callable[[str], str]

NEWEST = "0.16.1"
WORLDS = (1, 2, 4)


def _writers(*, own_classes: bool | None = None) -> list[object]:
    """Writers as parameters; older releases are slow."""
    chosen = [name for name, writer in WRITERS.items() if own_classes in (None, writer.own_classes)]
    return [n if n in ("shardckpt", NEWEST) else pytest.param(n, marks=pytest.mark.slow) for n in chosen]


@pytest.mark.parametrize("writer", _writers())
def test_shardckpt_loads(ranks: RankPool, saved: Saved, writer: str) -> None:
    """What anyone saved loads here, where Megatron is not importable, and every query describes it."""
    for world in (*WORLDS, 3):
        assert ranks.run(world, here.load, saved(writer)) == [True] * world
    here.check_queries(saved(writer), writer)


@pytest.mark.parametrize("writer", _writers())
def test_megatron_loads(megatron: Releases, saved: Saved, writer: str) -> None:
    """What anyone saved is loaded by the newest Megatron on PyPI that runs here."""
    for world in WORLDS:
        megatron(NEWEST).run(world, "load", saved(writer), writer)


@pytest.mark.slow
@pytest.mark.parametrize("release", [name for name in WRITERS if name not in ("shardckpt", NEWEST)])
def test_older_megatron_loads_what_is_saved_here(megatron: Releases, saved: Saved, release: str) -> None:
    """What is saved here is loaded by every older Megatron."""
    for world in WORLDS:
        megatron(release).run(world, "load", saved("shardckpt"), "shardckpt")


@pytest.mark.parametrize("writer", _writers(own_classes=False))
def test_plain_dcp_loads(ranks: RankPool, saved: Saved, writer: str) -> None:
    """What anyone saved without classes of its own is loaded by plain dcp.load: tensors, DTensors and objects."""
    plain_dcp.load(saved(writer))  # without a process group
    for world in WORLDS:
        ranks.run(world, plain_dcp.load, saved(writer))


@pytest.mark.parametrize("writer", _writers(own_classes=True))
def test_plain_dcp_needs_megatron_for_its_classes(
    ranks: RankPool, megatron: Releases, saved: Saved, tmp_path: Path, writer: str
) -> None:
    """The pickled plans of 0.11 to 0.15 stop plain DCP where there is no Megatron; rewritten here it loads them."""
    for world in WORLDS:
        for refusal in ranks.run(world, plain_dcp.refusal, saved(writer)):
            assert "No module named 'megatron'" in refusal
        megatron(NEWEST).run(world, "plain_dcp_load", saved(writer))
    here.rewrite(saved(writer), str(tmp_path / "rewritten"))
    for world in WORLDS:
        ranks.run(world, plain_dcp.load, str(tmp_path / "rewritten"))


@pytest.mark.slow
@pytest.mark.parametrize("release", [name for name, writer in WRITERS.items() if writer.refuses])
def test_what_releases_refuse(megatron: Releases, tmp_path: Path, release: str) -> None:
    """What the matrix leaves out for a release, that release does refuse, and for the reason that is given."""
    for key, reason in WRITERS[release].refuses.items():
        with pytest.raises(MegatronError, match=reason):
            megatron(release).run(4, "save_uneven", str(tmp_path / key), key)
