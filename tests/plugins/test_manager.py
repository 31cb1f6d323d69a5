from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.errors import CheckpointingException, PluginError, ShardingError, StorageError, UnknownBackendError
from shardckpt.huggingface.models import find_mapping
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins.entries import USER, StrategyAction
from shardckpt.plugins.hookspecs import Event, hookimpl
from shardckpt.plugins.manager import Plugin, PluginManager, get_plugin_manager, list_entry_points
from shardckpt.plugins.stores import open_folder
from shardckpt.strategy import SaveStrategy
from shardckpt_torch_dist import TorchDistLoadShardedStrategy
from tests.plugins.manager import Recorder, recorder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["recorder"]  # fixtures

REGISTERS = """
from shardckpt import hookimpl

@hookimpl
def shardckpt_register(registry):
    registry.add_lazy({backend!r}, 1, save="nowhere:Save", load="nowhere:Load")
"""


class Site:
    """A directory on sys.path into which distributions with entry points are put."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = path
        self._monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(path)

    def install(self, distribution: str, name: str, source: str) -> str:
        """Put version 1.5 of a distribution there, with one entry point and its module; the module's name."""
        module = f"{distribution.replace('-', '_')}_{self._path.name}".replace("-", "_")
        (self._path / f"{module}.py").write_text(source)
        info = self._path / f"{distribution.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[shardckpt]\n{name} = {module}\n")
        self._monkeypatch.setitem(sys.modules, module, None)  # so that the undo forgets it
        self._monkeypatch.delitem(sys.modules, module)
        return module


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Where a test installs plugins."""
    path = tmp_path / "site"
    path.mkdir()
    return Site(path, monkeypatch)


def _plugin(plugins: PluginManager, name: str) -> Plugin:
    [found] = [plugin for plugin in plugins.plugins() if plugin.name == name]
    return found


def _backends(plugins: PluginManager) -> set[str]:
    return {entry.backend for entry in plugins.registry.entries()}


def test_a_broken_plugin_does_not_break_another(site: Site) -> None:
    """Each entry point is guarded by itself: the good ones work, the broken ones are listed with their reason."""
    site.install("aaa-broken", "aaa", "import no_such_module_anywhere")
    site.install("bbb-works", "bbb", REGISTERS.format(backend="bbb"))
    site.install("ccc-broken", "ccc", "def broken(:")
    site.install("zzz-works", "zzz", REGISTERS.format(backend="zzz"))
    plugins = PluginManager()
    assert {"bbb", "torch_dist", "zzz"} <= _backends(plugins)
    faults = {plugin.name: plugin.fault for plugin in plugins.broken()}
    assert set(faults) == {"aaa", "ccc"}
    assert faults["aaa"] == "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    assert faults["ccc"].startswith("SyntaxError: ")
    assert _plugin(plugins, "aaa").distribution == "aaa-broken 1.5"


def test_a_plugin_that_fails_while_it_registers_leaves_nothing(site: Site) -> None:
    """What a failing plugin has added is taken back, and none of its hooks is called."""
    source = REGISTERS.format(backend="half") + (
        "    raise ValueError('no licence found')\n"
        "seen = []\n"
        "@hookimpl\n"
        "def shardckpt_event(event):\n"
        "    seen.append(event)\n"
    )
    module = site.install("half-way", "half", source)
    plugins = PluginManager()
    assert "half" not in _backends(plugins)
    assert _plugin(plugins, "half").fault == "ValueError: no licence found"
    plugins.hook.shardckpt_event(event=Event("save", "", "start", "", 0))
    assert sys.modules[module].seen == []


def test_two_plugins_with_one_key_are_told_apart(site: Site) -> None:
    """Of two plugins that claim a (backend, version) the first has it; the second's is off, and both are named."""
    site.install("first-toys", "one", REGISTERS.format(backend="toy"))
    site.install("second-toys", "two", REGISTERS.format(backend="toy"))
    plugins = PluginManager()
    assert _plugin(plugins, "one").conflicts == ()
    (said,) = _plugin(plugins, "two").conflicts
    assert "nowhere.Save of first-toys 1.5 and by nowhere.Save of second-toys 1.5" in said
    assert {e.distribution for e in plugins.registry.entries(backend="toy")} == {"first-toys 1.5"}


CLAIMS = """
from shardckpt import hookimpl, LoadStrategy, SaveStrategy

class Save(SaveStrategy):
    backend, version = "torch_checkpointing", 1
    def save(self, *args): ...

class Load(LoadStrategy):
    backend, version = "torch_checkpointing", 1
    load = load_common = load_index = None

@hookimpl
def shardckpt_register(registry):
    registry.add_lazy("torch_dist", 1, save="x:Save", load="x:Load", default=True{override})
    registry.add(Save)  # built in there is a reader alone
    registry.add(Load)
    registry.add_lazy("mine", 1, save="x:Save", load="x:Load", default=True)
    registry.add_lazy("safetensors", 1, load="x:Load")
    registry.add_lazy_migration("mine", 1, 2, "x:Migrate")

@hookimpl
def shardckpt_key_mapping(model_type):
    return "a mapping" if model_type == "mine" else None
"""


@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_a_claim_of_what_is_built_in_is_switched_off_alone(
    site: Site, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The built-in pairs and the default stay, whatever a plugin is called; the rest of it works, as a list says."""
    site.install("greedy", name, CLAIMS.format(override=""))
    plugins = PluginManager()
    found = {(e.backend, e.version, e.action.verb): e.distribution for e in plugins.registry.entries()}
    assert {key for key, distribution in found.items() if distribution == "greedy 1.5"} == {
        ("mine", 1, "load"),
        ("mine", 1, "save"),
    }
    assert plugins.registry.default == ("torch_dist", 1)
    assert plugins.broken() == []
    assert len(plugins.registry.migrations("mine")) == 1
    assert plugins.hook.shardckpt_key_mapping(model_type="mine") == "a mapping"
    said = _plugin(plugins, name).conflicts
    whats = ["('torch_dist', 1)", "('torch_checkpointing', 1)", "two strategies claim", "('safetensors', 1)"]
    assert [[what for what in whats if text.startswith(what)] for text in said] == [[what] for what in whats]
    monkeypatch.setattr("shardckpt.plugins.manager.get_plugin_manager", lambda: plugins)
    assert main(["strategies"]) == 1
    out = capsys.readouterr().out
    assert all(f"partly working: {name} (" in out and text in out for text in said)
    assert all(text in plugins.faults_text() for text in said)


def test_an_override_takes_what_is_built_in(site: Site) -> None:
    """override=True replaces a built-in pair and the default; the user's override is not undone."""
    site.install("greedy", "aaa", CLAIMS.format(override=", override=True"))
    plugins = PluginManager()
    assert {e.distribution for e in plugins.registry.entries(backend="torch_dist")} == {"greedy 1.5"}
    own = PluginManager()
    own.registry_before_plugins.put(StrategyAction.LOAD_SHARDED, "torch_dist", 1, TorchDistLoadShardedStrategy)
    assert [e.distribution for e in own.registry.entries(StrategyAction.LOAD_SHARDED, "torch_dist")] == [USER]


INTERRUPTED = """
import sys
from shardckpt import hookimpl
sys.attempts_of_a_test.append(1)
if {interrupts} and len(sys.attempts_of_a_test) == 1:
    raise KeyboardInterrupt

@hookimpl
def shardckpt_register(registry):
    registry.add_lazy("mine", 1, save="x:Save")
    if len(sys.attempts_of_a_test) == 1:
        raise {error}
"""


@pytest.mark.parametrize("name", ["mmm", "zzz"])
@pytest.mark.parametrize("interrupts", [True, False])
def test_ctrl_c_while_plugins_are_imported_loses_none(
    site: Site, name: str, interrupts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is half done after it: the next call imports all plugins, and each is registered once."""
    monkeypatch.setattr(sys, "attempts_of_a_test", [], raising=False)
    site.install("interrupted", name, INTERRUPTED.format(interrupts=interrupts, error="KeyboardInterrupt"))
    site.install("nnn", "nnn", REGISTERS.format(backend="nnn"))
    plugins = PluginManager()
    with pytest.raises(KeyboardInterrupt):
        plugins.plugins()
    assert plugins.registry_before_plugins.entries() == []
    if not interrupts:
        sys.attempts_of_a_test.append(1)  # type: ignore[attr-defined]
    assert plugins.broken() == []
    assert {"mine", "nnn", "torch_dist", "safetensors"} <= _backends(plugins)
    assert plugins.registry.default == ("torch_dist", 1)
    assert not any(plugin.conflicts for plugin in plugins.plugins())


def test_a_plugin_that_calls_exit_is_broken_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """sys.exit in a plugin, at its import or when it registers, ends no program: its text is the plugin's fault."""
    monkeypatch.setattr(sys, "attempts_of_a_test", [], raising=False)
    site.install("aaa", "aaa", "import sys\nsys.exit('this plugin needs another platform')")
    site.install("bbb", "bbb", INTERRUPTED.format(interrupts=False, error="SystemExit(3)"))
    plugins = PluginManager()
    assert {plugin.name: plugin.fault for plugin in plugins.broken()} == {
        "aaa": "SystemExit: this plugin needs another platform",
        "bbb": "SystemExit: 3",
    }
    assert "torch_dist" in _backends(plugins)
    assert "mine" not in _backends(plugins)


def test_disabled_plugins_are_not_imported(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """SHARDCKPT_DISABLED_PLUGINS leaves out the entry points that it names, and the listing says so."""
    module = site.install("toys", "toy", REGISTERS.format(backend="toy"))
    monkeypatch.setenv("SHARDCKPT_DISABLED_PLUGINS", " toy ,other")
    plugins = PluginManager()
    assert _backends(plugins) == {"ep", "safetensors", "torch_checkpointing", "torch_dist", "zarr"}
    assert _plugin(plugins, "toy").fault == "disabled by SHARDCKPT_DISABLED_PLUGINS"
    assert module not in sys.modules


def test_a_disabled_default_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save without a strategy, whose default plugin is left out, says by what, and not that anything is missing."""
    monkeypatch.setenv("SHARDCKPT_DISABLED_PLUGINS", "torch_dist")
    with pytest.raises(UnknownBackendError, match="SHARDCKPT_DISABLED_PLUGINS leaves out torch_dist; take it out"):
        PluginManager().find_default()


def test_plugins_are_imported_at_first_need(site: Site) -> None:
    """Names are listed, and a user registers, without importing any plugin; the first need imports it once."""
    module = site.install("toys", "toy", REGISTERS.format(backend="toy"))
    plugins = PluginManager()
    assert "toy" in {entry_point.name for entry_point in list_entry_points()}
    _ = plugins.registry_before_plugins
    assert module not in sys.modules
    assert "toy" in _backends(plugins)
    first = sys.modules[module]
    plugins.plugins()
    assert sys.modules[module] is first


MISSPELT = """
from shardckpt import hookimpl

@hookimpl
def shardckpt_registers(registry):
    pass
"""

WRONG_ARGUMENT = """
from shardckpt import hookimpl

calls = []

@hookimpl
def shardckpt_commands(subparsers):
    calls.append(subparsers)

@hookimpl
def shardckpt_event(evnt):
    pass
"""


def test_an_unknown_hook_is_refused(site: Site) -> None:
    """A misspelt hook would never be called: it is an error that names it."""
    site.install("misspelt", "misspelt", MISSPELT)
    plugins = PluginManager()
    fault = _plugin(plugins, "misspelt").fault
    assert "unknown hooks: shardckpt_registers, did you mean shardckpt_register?" in fault

    class Watcher:
        @hookimpl
        def shardckpt_events(self, event: Event) -> None: ...

    with pytest.raises(PluginError, match="unknown hooks: shardckpt_events"):
        plugins.register(Watcher())


def test_a_hook_without_its_decorator_is_refused(site: Site) -> None:
    """A function with the name of a hook, which would never be called, is an error that says what it lacks."""
    site.install("bare", "bare", "def shardckpt_register(registry): ...")
    text = "shardckpt_register of bare = .* is not decorated with @shardckpt.hookimpl"
    assert re.search(text, _plugin(PluginManager(), "bare").fault)


@pytest.mark.parametrize(
    ("value", "text"),
    [("json.decoder", "json.decoder = json.decoder has no hook"), ("./mine.py", "is not how a module is imported")],
)
def test_a_module_that_is_no_plugin_is_named(monkeypatch: pytest.MonkeyPatch, value: str, text: str) -> None:
    """A module without any hook, such as the package of the right one, and the path of a file, are broken plugins."""
    monkeypatch.setenv("SHARDCKPT_PLUGINS", value)
    assert text in _plugin(PluginManager(), value).fault


def test_a_hook_with_a_wrong_argument_is_refused_whole(site: Site) -> None:
    """A hook that asks for what there is not is named, and the plugin's other hooks are not called either."""
    module = site.install("wrong", "wrong", WRONG_ARGUMENT)
    plugins = PluginManager()
    fault = _plugin(plugins, "wrong").fault
    assert fault.startswith("shardckpt.errors.PluginError: wrong = ")
    assert "shardckpt_event(evnt): its arguments are named event" in fault
    plugins.hook.shardckpt_commands(subparsers=None)
    assert sys.modules[module].calls == []


class _Listener:
    @hookimpl
    def shardckpt_event(self, event: Event) -> None: ...


class _Spaces:
    """A class that is a namespace of hooks."""

    @staticmethod
    @hookimpl
    def shardckpt_event(event: Event) -> None: ...


class _RegistersNothing:
    @hookimpl
    def shardckpt_register(self) -> list[Any]:
        return [SaveStrategy]


def test_a_class_in_the_place_of_its_instance_is_refused() -> None:
    """Every event would fail for want of self; a class whose hooks are static methods is a plugin."""
    plugins = PluginManager()
    with pytest.raises(PluginError, match=r"_Listener is a class: register an instance of it, _Listener\(\.\.\.\)"):
        plugins.register(_Listener)
    plugins.register(_Spaces)
    plugins.register(_Listener())


def test_a_register_hook_without_the_registry_is_refused() -> None:
    """It could register nothing, and what it returns nobody looks at."""
    with pytest.raises(PluginError, match=r"shardckpt_register\(\): its arguments are named registry"):
        PluginManager().register(_RegistersNothing())


def _state(value: float = 1.0) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((4, 2), value)), "step": 3}


def test_a_plugin_is_registered_once() -> None:
    """Registering an object again is an error, and it stays registered; after unregister it hears nothing."""
    plugins, recorder = PluginManager(), Recorder()
    event = Event("save", "", "start", "", 0)
    plugins.register(recorder, "mine")
    with pytest.raises(PluginError, match="registered already, as mine"):
        plugins.register(recorder, "again")
    plugins.hook.shardckpt_event(event=event)
    assert recorder.events == [event]
    plugins.unregister(recorder)
    plugins.hook.shardckpt_event(event=event)
    assert recorder.events == [event]


def test_a_save_is_seen_from_start_to_end(recorder: Recorder, tmp_path: Path) -> None:
    """Every phase of a save starts and ends once; its end says how many bytes were written and by which strategy."""
    dc.save(_state(), tmp_path / "checkpoint")
    events = recorder.events
    assert {event.operation for event in events} == {"save"}
    assert {event.directory for event in events} == {str((tmp_path / "checkpoint").resolve())}
    assert events[0].state == "start"
    assert (events[0].phase, events[-1].phase, events[-1].state) == ("", "", "end")
    assert {"preparing the state dict", "validating", "staging", "writing", "committing"} <= {e.phase for e in events}
    for phase in {event.phase for event in events}:
        assert recorder.states(phase) == ["start", "end"]
    written = [path for path in (tmp_path / "checkpoint").iterdir() if path.suffix != ".json"]
    assert events[-1].nbytes == sum(path.stat().st_size for path in written)
    assert events[-1].strategy.startswith("('torch_dist', 1) shardckpt_torch_dist.save.")


def test_a_load_is_seen_from_start_to_end(recorder: Recorder, tmp_path: Path) -> None:
    """Every phase of a load starts and ends once, too."""
    dc.save(_state(), tmp_path / "checkpoint")
    recorder.events.clear()
    dc.load(_state(0.0), tmp_path / "checkpoint")
    assert {event.operation for event in recorder.events} == {"load"}
    assert {"reading the manifest", "choosing a strategy", "reading shards"} <= {e.phase for e in recorder.events}
    for phase in {event.phase for event in recorder.events}:
        assert recorder.states(phase) == ["start", "end"]
    assert recorder.events[-1].strategy.startswith("('torch_dist', 1) shardckpt_torch_dist.load.")


def test_a_failure_is_seen_with_its_text(recorder: Recorder, tmp_path: Path) -> None:
    """The phase that fails, and the operation as a whole, report the failure with its text."""
    dc.save(_state(), tmp_path / "checkpoint")
    recorder.events.clear()
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(5, 2))}
    with pytest.raises(ShardingError) as caught:
        dc.load(wanted, tmp_path / "checkpoint")
    phase, whole = recorder.events[-2:]
    assert (phase.state, whole.state, whole.phase) == ("failure", "failure", "")
    assert phase.phase == "comparing shapes"
    assert phase.error == whole.error == str(caught.value)
    assert recorder.states(phase.phase) == ["start", "failure"]


class _Fails:
    @hookimpl
    def shardckpt_event(self, event: Event) -> None:
        raise RuntimeError("the metrics server is away")

    @hookimpl
    def shardckpt_commands(self, subparsers: Any) -> None:
        raise RuntimeError("no such verb")


@pytest.fixture
def failing() -> Iterator[None]:
    """A plugin of this process whose hooks fail."""
    plugin = _Fails()
    get_plugin_manager().register(plugin)
    yield
    get_plugin_manager().unregister(plugin)


def test_a_failing_watcher_takes_no_event_from_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The others hear all of a save, and the failures are one warning, which names the plugin."""
    plugins, recorder = PluginManager(), Recorder()
    plugins.register(recorder)
    plugins.register(_Fails(), "metrics of team b")
    events = [Event("save", phase, "start", str(tmp_path), 0) for phase in ("", "writing", "committing")]
    for event in events:
        plugins.report(event)
    assert recorder.events == events
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "metrics of team b: its shardckpt_event failed" in warning.getMessage()


def test_a_watcher_that_calls_sys_exit_is_one_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It ends no training: the warning names the plugin and the exit."""

    class Exits:
        @hookimpl
        def shardckpt_event(self, event: Event) -> None:
            sys.exit(3)

    plugins = PluginManager()
    plugins.register(Exits(), "metrics of team c")
    plugins.report(Event("save", "", "start", str(tmp_path), 0))
    assert "metrics of team c: its shardckpt_event failed" in caplog.text
    assert "SystemExit: 3" in caplog.text


def test_a_failing_watcher_does_not_end_a_save(failing: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who only watches cannot break a checkpoint: the failure is logged, and the save goes on."""
    with caplog.at_level(logging.WARNING, "shardckpt"):
        dc.save(_state(2.0), tmp_path / "checkpoint")
    assert torch.equal(dc.load_plain_tensors(tmp_path / "checkpoint")["w"], torch.full((4, 2), 2.0))
    assert "the metrics server is away" in caplog.text


def test_a_failing_verb_does_not_take_the_others_away(failing: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The command works without a plugin's verbs if they fail, and says so."""
    assert main(["strategies"]) == 0
    output = capsys.readouterr()
    assert "torch_dist" in output.out
    assert "shardckpt_commands failed: RuntimeError: no such verb" in output.err


class _TakesLs:
    @hookimpl
    def shardckpt_commands(self, subparsers: Any) -> None:
        subparsers.add_parser("ls")


def test_a_verb_of_a_plugin_with_the_name_of_another_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The built-in one stays, on each version of Python, and help and ``strategies`` say what to do."""
    listener = _TakesLs()
    get_plugin_manager().register(listener)
    try:
        assert main(["strategies"]) == 0
    finally:
        get_plugin_manager().unregister(listener)
    assert "the verb 'ls' is a built-in one, which stays: give the plugin's another name" in capsys.readouterr().err


class _Greets:
    @hookimpl
    def shardckpt_commands(self, subparsers: Any) -> None:
        parser = subparsers.add_parser("greet", help="say hello")
        parser.add_argument("name")
        parser.set_defaults(run=self.run)

    @staticmethod
    def run(options: Any) -> int:
        if options.name == "nobody":
            raise CheckpointingException("nobody is here")
        print(f"hello {options.name}")  # noqa: T201 - a command prints
        return 4


def test_a_plugin_adds_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    """A plugin's verb runs like ours: its output, its exit status, its errors as one line on standard error."""
    plugin = _Greets()
    get_plugin_manager().register(plugin)
    try:
        assert main(["greet", "you"]) == 4
        assert capsys.readouterr().out == "hello you\n"
        assert main(["greet", "nobody"]) == 2
        assert capsys.readouterr().err == "shardckpt greet: nobody is here\n"
    finally:
        get_plugin_manager().unregister(plugin)
    with pytest.raises(SystemExit) as stop:
        main(["greet", "you"])
    assert stop.value.code == 2


def test_an_observer_in_the_place_of_all_others(site: Site) -> None:
    """In a process whose parent passes events to its plugins, an installed plugin does not observe them once more."""
    module = site.install(
        "watcher",
        "watch",
        """
from shardckpt import hookimpl
seen = []

@hookimpl
def shardckpt_event(event):
    seen.append(event)

@hookimpl
def shardckpt_filesystem(url):
    return "a folder" if url == "watched://" else None
""",
    )
    found: list[Any] = []

    class Observer:
        @hookimpl
        def shardckpt_event(self, event: Any) -> None:
            found.append(event)

    manager = PluginManager()
    manager.observe_by(Observer(), "observer")
    manager.hook.shardckpt_event(event="event")
    assert found == ["event"]
    assert sys.modules[module].seen == []
    assert len(manager.hook.shardckpt_event.get_hookimpls()) == 1
    assert manager.hook.shardckpt_filesystem(url="watched://", options={}) == "a folder"


def test_a_failing_hook_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a hook for URLs or mappings says whose it is, of which distribution, and in which line."""
    module = site.install(
        "broken",
        "breaks",
        """
from shardckpt import hookimpl

@hookimpl
def shardckpt_filesystem(url):
    raise ValueError("boom")

@hookimpl
def shardckpt_key_mapping(model_type):
    raise ValueError("kboom")
""",
    )
    manager = PluginManager()
    monkeypatch.setattr("shardckpt.huggingface.models.get_plugin_manager", lambda: manager)
    origin = rf"\(in {module}.%s of plugin breaks \(broken [^)]*\), .*:%d\)"
    with pytest.raises(StorageError, match=r"cannot open .*: boom " + origin % ("shardckpt_filesystem", 6)):
        open_folder("memory://b/p", manager)
    with pytest.raises(PluginError, match="failed: ValueError: kboom " + origin % ("shardckpt_key_mapping", 10)):
        find_mapping("llama")


def test_a_misspelt_variable_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A variable that is almost one of ours, which nothing would read, is a warning; a plugin's own is none."""
    monkeypatch.setenv("SHARDCKPT_IO_THRADS", "2")
    monkeypatch.setenv("SHARDCKPT_MYPLUGIN_URL", "x")
    PluginManager().plugins()
    said = [record.getMessage() for record in caplog.records if "environment" in record.getMessage()]
    assert said == ["SHARDCKPT_IO_THRADS in the environment has no effect: did you mean SHARDCKPT_IO_THREADS?"]


def test_a_plugin_to_disable_that_is_not_there_is_said(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name is misspelt: the plugin that is meant goes on working."""
    monkeypatch.setenv("SHARDCKPT_DISABLED_PLUGINS", "obstor,fsspec")
    PluginManager().plugins()
    said = [record.getMessage() for record in caplog.records if "DISABLED" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("SHARDCKPT_DISABLED_PLUGINS names 'obstor', and no plugin is called so: did you mean obs")


def test_a_module_is_a_plugin_by_the_environment_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``SHARDCKPT_PLUGINS`` names modules that no distribution does; one that is not there is broken, by name."""
    module = f"own_plugin_{tmp_path.name}".replace("-", "_")
    (tmp_path / "site" / f"{module}.py").write_text(REGISTERS.format(backend="mine"))
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setenv("SHARDCKPT_PLUGINS", f" {module}, not_there:plugin,")
    manager = PluginManager()
    assert manager.registry.find(StrategyAction.SAVE_SHARDED, "mine", 1) is not None
    (broken,) = [plugin for plugin in manager.broken() if plugin.distribution == "SHARDCKPT_PLUGINS"]
    assert (broken.name, broken.fault) == ("not_there:plugin", "ModuleNotFoundError: No module named 'not_there'")
    monkeypatch.setenv("SHARDCKPT_DISABLED_PLUGINS", module)
    assert module in [plugin.name for plugin in PluginManager().broken()]


def test_strategies_says_once_and_by_its_code_that_a_plugin_is_broken(
    site: Site,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answer has the reason: no line of the log says the same before it. One that is left out is no fault."""
    site.install("aaa-broken", "aaa", "raise RuntimeError('no licence')")
    manager = PluginManager()
    monkeypatch.setattr("shardckpt.plugins.manager.get_plugin_manager", lambda: manager)
    assert main(["strategies"]) == 1
    assert capsys.readouterr().out.count("RuntimeError: no licence") == 1
    assert "no licence" not in caplog.text
    monkeypatch.setenv("SHARDCKPT_DISABLED_PLUGINS", "aaa")
    manager = PluginManager()
    assert main(["strategies"]) == 0
    assert "disabled by SHARDCKPT_DISABLED_PLUGINS" in capsys.readouterr().out
