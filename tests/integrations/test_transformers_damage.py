"""Checkpoints of a Trainer whose damage shows only as they are read."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from tests.damage import flip
from tests.integrations import small
from tests.integrations.transformers import callback_of, config_of, resume, trainer_of


def _train(tmp_path: Path) -> bytes:
    """Train with steps 3 and 6 saved; return bytes of the weights of the last."""
    trainer = trainer_of(tmp_path, config_of(tmp_path, last_save_model_only=False), max_steps=6)
    trainer.train()
    weights = max(small.weights(trainer.model).values(), key=lambda weight: weight.numel())
    return weights.cpu().contiguous().numpy().tobytes()[:32]  # type: ignore[no-any-return]


def _damage(tmp_path: Path, step: int, content: bytes) -> None:
    """Change a bit of the file that has this content."""
    files = (tmp_path / "ours" / f"step-{step}").glob("*.distcp")
    flip(next(file for file in files if content in file.read_bytes()), content)


def test_a_step_whose_damage_shows_as_it_is_read_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two steps the newer one's Trainer state is damaged: the path is that of the older, said once."""
    _train(tmp_path)
    _damage(tmp_path, 6, b"log_history")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        path = callback_of(trainer_of(tmp_path, config_of(tmp_path))).resume_path()
    assert path is not None
    assert '"global_step": 3' in (Path(path) / "trainer_state.json").read_text()
    assert [
        record.getMessage().count("step 6 in") for record in caplog.records if "skipped" in record.getMessage()
    ] == [1]
    with pytest.raises(CorruptCheckpointError):
        callback_of(trainer_of(tmp_path, config_of(tmp_path))).resume_path(6)
    _damage(tmp_path, 3, b"log_history")
    with pytest.raises(CorruptCheckpointError, match=r"ours: no checkpoint there can be loaded, .* move them away"):
        callback_of(trainer_of(tmp_path, config_of(tmp_path))).resume_path()


def test_a_folder_that_cannot_be_made_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the Trainer's state cannot be written, no folder of it stays in the temporary directory."""
    _train(tmp_path)
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    callback = callback_of(trainer_of(tmp_path, config_of(tmp_path)))
    monkeypatch.setattr("transformers.TrainerState.save_to_json", lambda *_: {}["disk full"])
    with pytest.raises(CheckpointingException, match="disk full"):
        callback.resume_path()
    assert list(temporary.iterdir()) == []


def test_damaged_weights_are_an_error_that_says_what_to_call(tmp_path: Path) -> None:
    """The Trainer has found its position in the data when the weights are read: no other step is taken in silence."""
    weights = _train(tmp_path)
    _damage(tmp_path, 6, weights)
    with pytest.raises(CorruptCheckpointError, match=r"call resume_path\(<an earlier step>\)"):
        resume(trainer_of(tmp_path, config_of(tmp_path), max_steps=9))
    trainer = trainer_of(tmp_path, config_of(tmp_path), max_steps=9)
    resume(trainer, 3)
    assert trainer.state.global_step == 9
