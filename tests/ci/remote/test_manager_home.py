"""A manager whose only home is S3: names that clients escape, long listings, a reader beside the training."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
import torch

from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.stores import open_folder
from tests.remote.clients import served_by
from tests.remote.servers import BUCKET, PAGE, request
from tests.tables import in_proof

if TYPE_CHECKING:
    from collections.abc import Iterator

#: More than the server names in one answer to a listing.
_MANY = PAGE + 1


@pytest.fixture(params=["obstore", "s3fs"])
def folder(request: pytest.FixtureRequest, s3: str) -> Iterator[str]:
    """A URL of each client's own."""
    assert s3
    with served_by(request.param):
        yield f"s3://{BUCKET}/{request.param}"


class _Model(torch.nn.Module):
    """A model of one parameter whose name is as odd as its URL."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_parameter("größe 1+1%41", torch.nn.Parameter(torch.full((4,), float(value))))

    @property
    def value(self) -> float:
        return next(self.parameters())[0].item()


def _manage(url: str, model: torch.nn.Module, keep: int = 2) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(folder=url, interval=1, keep_latest_k=keep), {"model": model})


def _list(url: str) -> list[str]:
    opened = open_folder(url, get_plugin_manager())
    assert opened is not None
    return sorted(opened.tree())


def _put(endpoint: str, url: str, names: list[str]) -> None:
    prefix = quote(url.removeprefix("s3://"))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: request(endpoint, "PUT", f"{prefix}/{name}"), names))


@pytest.mark.parametrize("name", ["größe/50%25 #3?", *in_proof("größe/läufe", "a run", "1+1=2", "it's (1)~x")])
def test_a_manager_lives_at_any_name(folder: str, name: str) -> None:
    """Steps 1, 10 and 100 below names that clients escape: retention removes step 1 alone, a resume has the values."""
    url = f"{folder}/{name}"
    with _manage(url, model := _Model(0)) as manager:
        for step in (1, 10, 100):
            torch.nn.init.constant_(next(model.parameters()), step)
            assert manager.save(step)
        manager.wait()
        assert manager.steps() == [10, 100]
    assert {each.partition("/")[0] for each in _list(url)} == {"step-10", "step-100"}
    with _manage(url, resumed := _Model(0)) as manager:
        assert manager.load()
        assert resumed.value == 100


def test_listings_of_several_pages_are_read_to_their_end(folder: str, s3: str) -> None:
    """Beside a page of objects of others, and with as many in a step, steps are found, and a removed one is not."""
    url = f"{folder}/pages"
    with _manage(url, _Model(1), keep=1) as manager:
        assert manager.save(1)
        _put(s3, f"{url}/a-log", [f"{number}" for number in range(_MANY)])
        _put(s3, f"{url}/step-1", [f"notes/{number}" for number in range(_MANY)])
        assert manager.steps() == [1]
        assert manager.save(2)
        manager.wait()
        assert manager.steps() == [2]
    left = [each for each in _list(url) if not each.startswith("step-2/")]
    assert len(left) == 2 * _MANY
    assert all(each.startswith(("a-log/", "step-1/notes/")) for each in left)  # others' objects are theirs to remove


def test_another_manager_reads_while_the_training_goes_on(folder: str) -> None:
    """One that evaluates sees each new step, and none that has gone since it looked."""
    url = f"{folder}/two"
    with _manage(url, model := _Model(0), keep=1) as training, _manage(url, seen := _Model(0)) as evaluation:
        for step in (1, 2, 3):
            torch.nn.init.constant_(next(model.parameters()), step)
            assert training.save(step)
            training.wait()
            assert evaluation.steps() == [step]
            assert evaluation.load()
            assert seen.value == step
