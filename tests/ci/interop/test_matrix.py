"""Everyone who saves by everyone who loads: the sample at 4 ranks, loaded at 1, 2 and 4, every value compared.

Then checkpoints from which keys were removed here, and code that was ported. All that needs a release of Megatron-Core
is in this file: one worker of pytest runs it, and starts each release once.

No release of megatron-core is left out for a dtype: all save and load native float8, bool and complex as they are.
What releases cannot do is in ``writers.py``: shards of unequal size, which they then replicate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.compat.rewritten import STRATEGIES, run_script
from tests.interop import plain_dcp
from tests.interop.matrix import NEWEST, WORLDS, each_writer
from tests.interop.runner import MegatronError
from tests.interop.writers import WRITERS
from tests.tables import in_proof

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.interop.runner import Megatron
    from tests.ranks import RankPool, Ranks

    Releases = Callable[[str], Megatron]
    Saved = Callable[[str], str]


@pytest.mark.parametrize("world", [2, *in_proof(1, 4)])
@pytest.mark.parametrize("writer", each_writer())
def test_megatron_loads(megatron: Releases, saved: Saved, writer: str, world: int) -> None:
    """What anyone saved is loaded by the newest Megatron on PyPI that runs here."""
    megatron(NEWEST).run(world, "load", saved(writer), writer)


@pytest.mark.parametrize("writer", each_writer(own_classes=False))
def test_plain_dcp_loads(gloo_ranks: RankPool, saved: Saved, writer: str) -> None:
    """What anyone saved without classes of its own is loaded by plain dcp.load: tensors, DTensors and objects."""
    plain_dcp.load(saved(writer))  # without a process group
    for world in WORLDS:
        gloo_ranks.run(world, plain_dcp.load, saved(writer))


@pytest.mark.parametrize(
    "release", [pytest.param(name, marks=pytest.mark.proof) for name, writer in WRITERS.items() if writer.refuses]
)
def test_what_releases_refuse(megatron: Releases, tmp_path: Path, release: str) -> None:
    """What the matrix leaves out for a release, that release does refuse, and for the reason that is given."""
    for key, reason in WRITERS[release].refuses.items():
        with pytest.raises(MegatronError, match=reason):
            megatron(release).run(4, "save_uneven", str(tmp_path / key), key)


def test_a_strategy_of_megatrons_kind_runs_in_both(ranks: Ranks, megatron: Releases, tmp_path: Path) -> None:
    """One strategy, unchanged but for the import rule, reads here what it wrote under Megatron, and the other way."""
    there, here = str(tmp_path / "there"), str(tmp_path / "here")
    megatron(NEWEST).run(2, "call", str(STRATEGIES), "save", there, "3")
    ranks.run(2, run_script, STRATEGIES, "save", here, "4")
    for world in (1, 2):
        ranks.run(world, run_script, STRATEGIES, "load", there, "3")
        megatron(NEWEST).run(world, "call", str(STRATEGIES), "load", here, "4")
