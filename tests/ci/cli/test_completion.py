"""``shardckpt completion``: what a shell offers after a part of a command line."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from shardckpt.cli import main

if TYPE_CHECKING:
    from pathlib import Path

_ASK = """source "$1"
COMP_WORDS=("${@:2}"); COMP_CWORD=$(( $# - 2 ))
_shardckpt
printf '%s\\n' "${COMPREPLY[@]}"
complete -p shardckpt
"""


def _print_script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def test_bash_completes_verbs_options_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a real bash: verbs, options of the verb, choices of an option; where a path stands, what bash completes."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    (tmp_path / "script").write_text(_print_script("bash", capsys))

    def complete(*words: str) -> list[str]:
        asked = subprocess.run(
            [bash, "--norc", "-euc", _ASK, "bash", str(tmp_path / "script"), *words],
            capture_output=True,
            text=True,
            check=True,
        )
        *found, registered = asked.stdout.split("\n")[:-1]
        assert "-o default" in registered
        return [word for word in found if word]

    assert complete("shardckpt", "in") == ["inspect"]
    assert {"ls", "verify", "completion", "--version"} <= set(complete("shardckpt", ""))
    assert complete("shardckpt", "--traceback", "mig") == ["migrate"]
    assert complete("shardckpt", "inspect", "path", "--tr") == ["--tree"]
    assert complete("shardckpt", "inspect", "--sort", "") == ["key", "size"]
    assert complete("shardckpt", "export", "--format", "b") == ["bin"]
    assert complete("shardckpt", "completion", "") == ["bash", "zsh", "fish"]
    assert complete("shardckpt", "inspect", "") == []
    assert complete("shardckpt", "nothing", "--") == []


#: As `compgen` of bashcompinit calls the function: with the options of sh.
_ASK_ZSH = """autoload -U compinit && compinit -u -D
source "$1"
ask() {
    emulate -L sh
    setopt kshglob noshglob braceexpand
    COMP_WORDS=("$@")
    COMP_CWORD=$(( $# - 1 ))
    _shardckpt && printf '%s\\n' "${COMPREPLY[@]}"
}
ask "${@:2}"
"""


def test_zsh_completes_verbs_options_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a real zsh, whose options differ from bash's: verbs, options of the verb, and choices of an option."""
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "script").write_text(_print_script("zsh", capsys))

    def complete(*words: str) -> list[str]:
        command = [zsh, "-fc", _ASK_ZSH, "zsh", str(tmp_path / "script"), "shardckpt", *words]
        asked = subprocess.run(command, capture_output=True, text=True, check=True)
        assert asked.stderr == ""
        # bashcompinit leaves it to zsh to drop what does not begin as the word does
        return [word for word in asked.stdout.split() if word.startswith(words[-1])]

    assert complete("insp") == ["inspect"]
    assert complete("--traceback", "mig") == ["migrate"]
    assert complete("inspect", "path", "--tr") == ["--tree"]
    assert complete("inspect", "--sort", "") == ["key", "size"]
    assert complete("completion", "") == ["bash", "zsh", "fish"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_the_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It names every verb and the choices of options; where the shell is installed, it reads the script."""
    script = _print_script(shell, capsys)
    assert all(word in script for word in ("inspect", "verify", "completion", "safetensors bin", "traceback"))
    path = shutil.which(shell)
    if path is not None:
        (tmp_path / "script").write_text(script)
        subprocess.run([path, "-n", str(tmp_path / "script")], check=True)
