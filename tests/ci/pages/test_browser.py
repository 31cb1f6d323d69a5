"""Pages in a browser without a window. Skipped where no Chromium is installed."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.maintenance import DiffReport, TensorDifference
from shardckpt.mapping import ShardedTensor
from shardckpt.pages.checkpoint import describe_layouts, describe_tensors
from shardckpt.pages.difference import describe_difference
from shardckpt.pages.render import write_page
from shardckpt.strategy import StoredBox
from tests.cli.checkpoints import copy_golden
from tests.pages.render import HOSTILE

if TYPE_CHECKING:
    from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")]


def _open(page: Path, tmp_path: Path, width: int = 1440) -> str:
    """The document after its script has run; fails if the script has raised, or the policy has stopped something."""
    run = subprocess.run(
        [
            *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--enable-logging=stderr", "--virtual-time-budget=3000", f"--window-size={width},1000"),
            *("--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    faults = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    assert not faults
    assert 'data-drawn="yes"' in run.stdout
    return run.stdout


def _save(path: Path, values: dict[str, torch.Tensor]) -> None:
    """Each tensor in two boxes."""
    state = {
        key: [ShardedTensor.from_rank_offsets(key, half, (0, n, 2)) for n, half in enumerate(value.chunk(2))]
        for key, value in values.items()
    }
    dc.save(state, path, step=5)


def test_a_page_draws_boxes_modules_and_the_time_line(tmp_path: Path) -> None:
    """The script raises nothing; the drawing has the boxes of a tensor, the modules, and each phase of the save."""
    _save(tmp_path / "c", {"a.b.w": torch.ones(4, 4), "a.c.w": torch.ones(8, 2)})
    assert main(["inspect", str(tmp_path / "c"), "--html", str(tmp_path / "page.html")]) == 0
    found = _open(tmp_path / "page.html", tmp_path)
    assert len(re.findall('<rect class="box', found)) == 2
    assert {"b.w", "c.w"} <= set(re.findall(r'class="cell".*?<b>(.*?)</b>', found))
    assert set(re.findall(r"<title>rank 0 · (\w+):", found)) == {"plan", "write", "sync", "commit"}


def test_a_page_of_two_checkpoints_lists_what_differs(tmp_path: Path) -> None:
    """The tensors that differ are there with their differences, and both maps of the worst."""
    _save(tmp_path / "one", {"a.w": torch.ones(4, 4), "a.v": torch.ones(4)})
    _save(tmp_path / "two", {"a.w": torch.ones(4, 4) * 1.5, "a.v": torch.ones(4)})
    arguments = ["diff", str(tmp_path / "one"), str(tmp_path / "two"), "--html", str(tmp_path / "page.html")]
    assert main(arguments) == 1
    found = _open(tmp_path / "page.html", tmp_path)
    assert "1 of 2 tensors differ" in found
    assert "norm 0.500 · max rel 0.333" in found
    assert re.search(r"<span>a</span><div class=\"track\">.*?</div></div><span>0.500</span>", found)
    assert re.search(r"<span>1e-1 to 1</span><div class=\"track\">.*?</div></div><span>1 tensor</span>", found)
    assert len(re.findall('<svg[^>]*class="shards"', found)) == 2


def test_a_page_with_values_has_norms(tmp_path: Path) -> None:
    """With --stats there are norms of tensors by powers of ten, of each layer that of all its tensors, NaN and Inf."""
    values = {"m.2.a": torch.full((4,), 1.5), "m.2.b": torch.full((4,), 2.0), "m.10.a": torch.zeros(4)}
    _save(tmp_path / "c", values | {"odd": torch.tensor([0.0, float("inf"), 20.0, float("nan")])})
    main(["inspect", str(tmp_path / "c"), "--stats", "--html", str(tmp_path / "page.html")])
    found = _open(tmp_path / "page.html", tmp_path)
    bars = re.findall(r"<span>([^<]*)</span><div class=\"track\">.*?</div></div><span>([^<]*)</span>", found)
    assert [bar for bar in bars if "tensor" in bar[1]][:2] == [("1e1 to 1e2", "1 tensor"), ("1 to 1e1", "2 tensors")]
    assert [bar for bar in bars if bar[0].startswith("m.")] == [("m.2", "5.00"), ("m.10", "0")]
    assert "1 tensor with values that are not finite, which norms leave out: odd (1 NaN, 1 Inf)" in found


def test_infinite_changes_are_counted_and_layers_may_be_many(tmp_path: Path) -> None:
    """A tensor that became NaN has a bar in both charts of a difference; 200,000 layers do not break them."""
    key, many = "w.0", 200_000
    sides: list[dict[str, Any]] = []
    unknown = dict.fromkeys(("save_id", "parent", "step", "writer", "library", "ranks", "saved_at", "bytes_on_disk"))
    head = {**unknown, "name": "c", "backend": "ep", "version": 1, "metrics": None, "rescued": 0, "rescued_keys": []}
    for _ in range(2):
        tensors = describe_tensors((f"w.{n}", "float32", (1,), 4) for n in range(many))
        rest = {"objects": [], "objectCount": 0, "common": [], "commonCount": 0, "commonFault": "", "incomplete": []}
        boxes = describe_layouts([StoredBox(key, (0,), (1,), "f")], tensors["keys"], ["f"])
        files = {"files": ["f"], "fileBytes": [4], "fileRank": [0], "boxesFault": "", "prefix": ""}
        sides.append({"head": head, **tensors, **boxes, **files, **rest})
    rows = [TensorDifference(f"w.{n}", "values", "f", "f", 1, 1, 1.0, 1.0, (0,), 0.5) for n in range(1, many)]
    rows.append(TensorDifference(key, "values", "f", "f", 1, 1, float("inf"), float("inf"), (0,), float("inf")))
    write_page(tmp_path / "page.html", "d", describe_difference(DiffReport(0, 0, tuple(rows)), *sides))
    found = _open(tmp_path / "page.html", tmp_path)
    assert re.search(r"<span>infinite or NaN</span><div class=\"track\">.*?</div></div><span>1 tensor</span>", found)
    assert re.search(r"<span>w.0</span><div class=\"track\">.*?</div></div><span>infinite</span>", found)


def test_a_module_of_one_module_is_folded_and_layers_are_drawn(tmp_path: Path) -> None:
    """A chain of modules is one cell, and what is in it is drawn inside, down to the layers' own modules."""
    layers = {f"model.decoder.layers.{n}.{part}.w": torch.ones(64, 64) for n in range(2) for part in ("attn", "mlp")}
    _save(tmp_path / "c", {**layers, **{f"optimizer.state.{key}": value for key, value in layers.items()}})
    main(["inspect", str(tmp_path / "c"), "--html", str(tmp_path / "page.html")])
    found = _open(tmp_path / "page.html", tmp_path)
    cells = set(re.findall(r'class="cell".*?<b>(.*?)</b>', found))
    assert {"model.decoder.layers", "optimizer.state.model.decoder.layers"} <= cells
    inside = re.findall(r'<i title="([\w.]+) · ', found)
    assert {"0", "1", "attn.w", "mlp.w"} <= set(inside)


def test_times_are_iso_ids_short_and_parameters_counted(tmp_path: Path) -> None:
    """The head has the time in UTC, eight digits of the id with the whole on hover, and the model's parameters."""
    _save(tmp_path / "c", {"model.w": torch.ones(4, 4), "optimizer.state.model.w.exp_avg": torch.ones(4, 4)})
    main(["inspect", str(tmp_path / "c"), "--html", str(tmp_path / "page.html")])
    found = _open(tmp_path / "page.html", tmp_path)
    assert re.search(r"<dd>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ</dd>", found)
    assert re.search(r'<dd title="([0-9a-f]{8})[0-9a-f]{24}">\1…</dd>', found)
    assert re.search(r"<dt>parameters</dt><dd [^>]*>16</dd>", found)


def test_names_that_are_too_long_keep_their_ends(tmp_path: Path) -> None:
    """On a narrow screen the rows of two moments of one parameter differ: a name loses its middle."""
    module = f"optimizer.state.{'layers.0.' * 9}mlp.weight"
    _save(tmp_path / "c", {f"{module}.{moment}": torch.ones(4) for moment in ("exp_avg", "exp_avg_sq")})
    main(["inspect", str(tmp_path / "c"), "--html", str(tmp_path / "page.html")])
    found = _open(tmp_path / "page.html", tmp_path, 500)
    rows = re.findall(r'class="row".*?<span[^>]*>(.*?)</span>', found)
    assert [row.rpartition(".")[2] for row in rows] == ["exp_avg", "exp_avg_sq"]
    assert all(row.startswith("optimizer.") and "…" in row for row in rows)


def test_the_whole_difference_is_above_the_maps(tmp_path: Path) -> None:
    """A row of the list may be too narrow for where a tensor differs first; the text of the chosen one is not cut."""
    _save(tmp_path / "one", {"a.w": torch.ones(4, 4), "a.v": torch.ones(4)})
    _save(tmp_path / "two", {"a.w": torch.ones(4, 4).index_fill(0, torch.tensor(2), 2), "a.v": torch.ones(4)})
    main(["diff", str(tmp_path / "one"), str(tmp_path / "two"), "--html", str(tmp_path / "page.html")])
    found = _open(tmp_path / "page.html", tmp_path, 500)
    (text,) = re.findall(r'<p class="any">(values · .*?)</p>', found)
    assert "4 of 16 · first at [2, 0] · float32 [4, 4]" in text


def test_boxes_without_ranks_have_the_numbers_of_their_files(tmp_path: Path) -> None:
    """The numbers in the map of another library's checkpoint stand in its legend."""
    place = copy_golden("0.12.3", tmp_path)
    main(["inspect", str(place), "grid", "--html", str(tmp_path / "page.html")])
    found = _open(tmp_path / "page.html", tmp_path)
    drawn = set(re.findall(r'<text class="on"[^>]*>(\d+)</text>', found))
    assert drawn
    assert drawn <= set(re.findall(r"<span>(\d+) · __\d_\d\.distcp · ", found))


def test_hostile_keys_do_not_run(tmp_path: Path) -> None:
    """A key with an end of the script and a handler is shown as text: no element is made of it."""
    key = HOSTILE.replace("\ud800", "").replace(".", "_")
    _save(tmp_path / "c", {key: torch.ones(4), f"{key}.{key}": torch.ones(2)})
    main(["inspect", str(tmp_path / "c"), "--html", str(tmp_path / "page.html")])
    found = _open(tmp_path / "page.html", tmp_path)
    assert "<img" not in found
    assert html.escape(key.split("\u2028")[0], quote=False).split("&amp;amp;")[0] in found
    assert "<title>run</title>" not in found


def test_a_page_of_ten_thousand_tensors_has_few_elements(tmp_path: Path) -> None:
    """Rows that are out of sight are not made, and the page is below 2 MB."""
    keys = [f"layers.{n}.w" for n in range(10_000)]
    boxes = [StoredBox(key, (row, 0), (1, 64), f"f{row}") for key in keys for row in range(8)]
    files: dict[str, Any] = {"files": [f"f{row}" for row in range(8)], "fileBytes": [1] * 8, "fileRank": [*range(8)]}
    head = {"backend": "b", "version": 1, "step": 1, "ranks": 8, "name": "c", "writer": {"shardckpt": "1"}}
    data = {
        **describe_tensors((key, "float32", (8, 64), 4) for key in keys),
        **describe_layouts(boxes, keys, files["files"]),
        **files,
        "objects": [],
        "objectCount": 0,
        "common": [],
        "commonCount": 0,
        "commonFault": "",
        "boxesFault": "",
        "prefix": "",
        "incomplete": [],
        "timings": None,
        "head": head | {"saved_at": None, "bytes_on_disk": None, "save_id": None, "parent": None},
    }
    assert write_page(tmp_path / "page.html", "c", data) < 2 << 20
    found = _open(tmp_path / "page.html", tmp_path, 500)
    assert "Search 10,000 tensors" in found
    assert 5 < len(re.findall('class="row"', found)) < 50
    assert len(re.findall('<rect class="box', found)) == 8
    assert "no timings" in found
