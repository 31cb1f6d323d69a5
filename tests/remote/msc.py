"""What the tests of msc share."""

from __future__ import annotations

import json
import os
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("multistorageclient")


class Profile(NamedTuple):
    """A profile of MSC's: its configuration file, and a URL of it."""

    config: str
    url: str


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """A profile whose objects are files of a directory; its name is new, because MSC keeps the clients it has made."""
    (tmp_path / "objects").mkdir()
    name = f"profile-{uuid.uuid4().hex}"
    provider = {"type": "file", "options": {"base_path": str(tmp_path / "objects")}}
    path = tmp_path / "msc.json"
    path.write_text(json.dumps({"profiles": {name: {"storage_provider": provider}}}))
    monkeypatch.setenv("MSC_CONFIG", str(path))
    return Profile(str(path), f"msc://{name}/jobs/c")


def configured(config: str, action: Any, *arguments: Any, **options: Any) -> Any:
    """Do it in a rank with MSC's configuration in its environment."""
    os.environ["MSC_CONFIG"] = config
    return action(*arguments, **options)
