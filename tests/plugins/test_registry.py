from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.compat.megatron.dist_checkpointing.strategies.base import SaveShardedStrategy as MegatronSaver
from shardckpt.errors import CheckpointingException, DuplicateStrategyError, PluginError
from shardckpt.plugins.entries import StrategyAction, _import_class
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.registry import StrategyRegistry, parse_key, parse_keys
from shardckpt.strategy import LoadStrategy, Migration, SaveStrategy
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

SAVE, LOAD = StrategyAction.SAVE_SHARDED, StrategyAction.LOAD_SHARDED


class _SaveToy(SaveStrategy):
    backend, version, writes = "toy", 1, "nothing"

    def save(self, *_: Any) -> None: ...


class _Nameless(SaveStrategy):
    def save(self, *_: Any) -> None: ...


class _NumberedByText(_SaveToy):
    version = "1"  # type: ignore[assignment]


class _OtherSaveToy(_SaveToy):
    pass


class _LoadToy(LoadStrategy):
    backend, version, reads = "toy", 1, "all"

    def load(self, *_: Any) -> list[Any]:
        return []

    def load_common(self, *_: Any) -> dict[str, Any]:
        return {}

    def load_index(self, *_: Any) -> list[Any]:
        return []


class _LoadToy2(_LoadToy):
    version = 2


class _OneToTwo(Migration):
    backend, from_version, to_version = "toy", 1, 2

    def migrate(self, *_: Any) -> None: ...


class _AnotherOneToTwo(_OneToTwo):
    pass


class _OneToThree(_OneToTwo):
    to_version = 3


class _Unfinished(LoadStrategy):
    backend, version = "toy", 7


class _Nameless(SaveStrategy):
    def save(self, *_: Any) -> None: ...


class _TextVersion(_SaveToy):
    version: Any = "1"


class _Shadowed(_LoadToy):
    def reads(self) -> None: ...  # type: ignore[assignment]


def _add(registry: StrategyRegistry, distribution: str, *strategies: Any, override: bool = False) -> None:
    """Register as a plugin of the distribution does."""
    with registry.attribute_to(distribution):
        for strategy in strategies:
            registry.add(strategy, override=override)


def _claim(registry: StrategyRegistry, distribution: str, backend: str, *, override: bool = False) -> None:
    with registry.attribute_to(distribution):
        registry.add_lazy(backend, 1, save="m:C", default=True, override=override)


def _target(registry: StrategyRegistry, action: StrategyAction = SAVE) -> Any:
    entry = registry.find(action, "toy", 1)
    assert entry is not None
    return entry.target


def test_a_class_is_found_under_its_own_backend_and_version() -> None:
    """A strategy class names its key, its summary and its direction itself."""
    registry = StrategyRegistry()
    _add(registry, "toys 1.0", _SaveToy, _LoadToy, _LoadToy2)
    entry = registry.find(SAVE, "toy", 1)
    assert entry is not None
    assert (entry.target, entry.summary, entry.distribution) == (_SaveToy, "nothing", "toys 1.0")
    assert [e.version for e in registry.entries(LOAD, "toy")] == [2, 1]
    assert registry.find(SAVE, "toy", 2) is None
    assert registry.entries(backend="boat") == []


def test_every_operation_gets_a_fresh_instance_of_a_class() -> None:
    """A class serves each operation with a new instance; an instance serves all of them itself."""
    registry = StrategyRegistry()
    instance = _LoadToy()
    _add(registry, "toys 1.0", _SaveToy, instance)
    saver, loader = registry.find(SAVE, "toy", 1), registry.find(LOAD, "toy", 1)
    assert saver is not None
    assert loader is not None
    first, second = saver.create(), saver.create()
    assert type(first) is type(second) is _SaveToy
    assert first is not second
    assert loader.create() is loader.create() is instance


def test_a_duplicate_names_both_classes_and_distributions() -> None:
    """Two strategies for one key are an error that names both sides and every way out; the first one stays."""
    registry = StrategyRegistry()
    _add(registry, "toys 1.0", _SaveToy)
    with pytest.raises(DuplicateStrategyError) as caught:
        _add(registry, "games 2.3", _OtherSaveToy)
    for text in (
        "('toy', 1)",
        "_SaveToy of toys 1.0",
        "_OtherSaveToy of games 2.3",
        "DISABLED_PLUGINS",
        "override=True",
    ):
        assert text in str(caught.value)
    assert _target(registry) is _SaveToy


def test_the_user_is_told_of_a_duplicate_too() -> None:
    """An add() of the user is never dropped in silence, not even over an override."""
    registry = StrategyRegistry()
    _add(registry, "toys 1.0", _SaveToy, override=True)
    with pytest.raises(DuplicateStrategyError, match="_OtherSaveToy of this process"):
        registry.add(_OtherSaveToy)


@table("override_first", [True, False])
def test_an_override_wins_in_either_order(override_first: bool) -> None:
    """override=True replaces a plain registration, and a default, whether it comes before or after."""
    registry = StrategyRegistry()
    plugins = [("toys 1.0", _SaveToy, "toys", False), ("games 2.3", _OtherSaveToy, "games", True)]
    for distribution, strategy, default, override in reversed(plugins) if override_first else plugins:
        _add(registry, distribution, strategy, override=override)
        _claim(registry, distribution, default, override=override)
    assert _target(registry) is _OtherSaveToy
    assert registry.default == ("games", 1)
    assert {entry.backend for entry in registry.entries()} == {"toy", "toys", "games"}


def test_two_plugins_cannot_both_override() -> None:
    """Two overrides of one key, or of the default, contradict each other: refused, naming both; the first stays."""
    registry = StrategyRegistry()
    _add(registry, "toys 1.0", _SaveToy, override=True)
    with pytest.raises(DuplicateStrategyError, match=r"(?s)toys 1\.0.*games 2\.3"):
        _add(registry, "games 2.3", _OtherSaveToy, override=True)
    _claim(registry, "toys 1.0", "toys", override=True)
    with pytest.raises(DuplicateStrategyError, match="claim to be the default"):
        _claim(registry, "games 2.3", "games", override=True)
    assert registry.default == ("toys", 1)


@table("override", [True, False])
def test_a_users_override_is_never_undone(override: bool) -> None:
    """What the user put in place stays, and plugins that come later for the same key are not broken by it."""
    registry = StrategyRegistry()
    registry.put(SAVE, "toy", 1, _OtherSaveToy)
    _add(registry, "toys 1.0", _SaveToy, _LoadToy, override=override)
    assert _target(registry) is _OtherSaveToy
    assert _target(registry, LOAD) is _LoadToy
    registry.put(SAVE, "toy", 1, _SaveToy)
    assert _target(registry) is _SaveToy


def test_register_default_strategy_serves_the_front_door() -> None:
    """What the user registers is what save and the queries use: a class afresh, an instance as it is."""
    with get_plugin_manager().registry.preserved():
        dc.register_default_strategy(SAVE, "toy", 1, _SaveToy)
        first = dc.get_default_save_sharded_strategy("toy", 1)
        assert type(first) is _SaveToy
        assert dc.get_default_save_sharded_strategy("toy") is not first
        instance = _OtherSaveToy()
        dc.register_default_strategy(SAVE, "toy", 1, instance)
        assert dc.get_default_save_sharded_strategy("toy", 1) is instance
    with pytest.raises(PluginError, match="_SaveToy is not a LoadStrategy"):
        dc.register_default_strategy(LOAD, "toy", 1, _SaveToy)


@table(
    ("backend", "version", "message"),
    [
        ("toy", "1", r"\('toy', '1'\).* version as int, 1 or more"),
        ("toy", 0, "version as int, 1 or more"),
        ("toys", 1, r"under \('toys', 1\) a strategy of \('toy', 1\)"),
        ("toy", 2, r"under \('toy', 2\) a strategy of \('toy', 1\)"),
    ],
)
def test_what_is_registered_under_another_key_is_refused(backend: Any, version: Any, message: str) -> None:
    """A save records what the strategy says of itself: under any other key it would be found and not load again."""
    registry = StrategyRegistry()
    for action, strategy in ((SAVE, _SaveToy), (LOAD, _LoadToy)):
        with pytest.raises(PluginError, match=message):
            registry.put(action, backend, version, strategy)
    assert registry.entries() == []


@table(
    ("wrong", "message"),
    [
        (int, "int is neither a SaveStrategy nor a LoadStrategy, nor a Migration$"),
        (
            MegatronSaver,
            "as Megatron.s strategies do: call register_default_strategy of .* in the hook",
        ),
        (_Nameless, r"_Nameless must name its backend \(str\) and version \(int\) as class attributes"),
        (_TextVersion, "_TextVersion must name its backend"),
        (_Shadowed, r"_Shadowed.reads is a text.*<function .*another name"),
    ],
)
def test_what_is_no_strategy_is_refused(wrong: Any, message: str) -> None:
    """Only strategies that say what they are get in; the error says what is wrong with the class."""
    registry = StrategyRegistry()
    with pytest.raises(PluginError, match=message):
        registry.add(wrong)
    assert registry.entries() == []


def test_a_name_that_is_none_is_refused() -> None:
    """What a lazy registration names is checked when it is registered, and the error says what to give."""
    registry: Any = StrategyRegistry()
    for wrong in ((b"x", 1), ("x", "1"), ("x", True), ("x", 1.0), ("", 1), (None, 1), ("x", 0), ("x", -1)):
        with pytest.raises(PluginError, match=r"backend as str and its version as int"):
            registry.add_lazy(*wrong, save="m:C")
        with pytest.raises(PluginError, match=r"backend as str and its version as int"):
            registry.add_lazy_migration(*wrong, 2, "m:C")
    for target in ("m.C", b"m:C", 7, ":C", "m:", "m:C:D"):
        for option in ("save", "load", "outline"):
            with pytest.raises(PluginError, match=rf"{option}=.*'module:Class'"):
                registry.add_lazy("x", 1, **{option: target})
        with pytest.raises(PluginError, match=r"migration=.*'module:Class'"):
            registry.add_lazy_migration("x", 1, 2, target)
    assert registry.entries() == registry.migrations() == []


def test_a_class_that_cannot_be_created_is_a_plugin_error() -> None:
    """A strategy that lacks methods is named when it is needed, with Python's reason."""
    registry = StrategyRegistry()
    _add(registry, "toys 1.0", _Unfinished)
    with pytest.raises(PluginError, match=r"_Unfinished of toys 1\.0 cannot be created: TypeError: .*abstract"):
        registry.entries()[0].create()


def test_a_failed_registration_is_taken_back() -> None:
    """A plugin that fails half-way leaves nothing: strategies, migrations and default are as before."""
    registry = StrategyRegistry()
    _add(registry, "toys 1.0", _SaveToy)

    def register() -> None:
        with registry.attribute_to("games 2.3"):
            registry.add(_LoadToy)
            registry.add(_OtherSaveToy, override=True)
            registry.add_migration(_OneToTwo)
            registry.add_lazy("game", 1, save="m:C", default=True)
            raise KeyError("half-way")

    with pytest.raises(KeyError):
        register()
    assert [entry.target for entry in registry.entries()] == [_SaveToy]
    assert registry.migrations("toy", 1) == []
    with pytest.raises(PluginError, match="no default strategy"):
        _ = registry.default


LAZY_MODULE = """
from shardckpt.strategy import Migration
from tests.plugins.test_registry import _LoadToy, _OneToTwo, _SaveToy

class Saver(_SaveToy):
    pass

class Newer(_SaveToy):
    version = 2

class Loader(_LoadToy):
    pass

class Migrator(_OneToTwo):
    pass

class Unversioned(Migration):
    backend = "toy"

    def migrate(self, *_):
        pass

class Exits(_SaveToy):
    def __init__(self):
        raise SystemExit("no licence for libtoy")

number = 3
"""


@pytest.fixture
def lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that is not imported yet."""
    name = f"lazy_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(LAZY_MODULE)
    (tmp_path / f"{name}_broken.py").write_text("raise RuntimeError('libtoy is too old')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)  # so that the undo forgets it
    monkeypatch.delitem(sys.modules, name)
    return name


def test_a_lazy_strategy_is_imported_at_first_use(lazy: str) -> None:
    """A strategy given as text is listed with its class and summary, and imported only when it is created."""
    registry = StrategyRegistry()
    registry.add_lazy("toy", 1, save=f"{lazy}:Saver", load=f"{lazy}:Loader", writes="w", reads="r")
    assert [(e.name, e.summary) for e in registry.entries()] == [(f"{lazy}.Loader", "r"), (f"{lazy}.Saver", "w")]
    assert lazy not in sys.modules
    loader, saver = (entry.create() for entry in registry.entries())
    assert isinstance(loader, _LoadToy)
    assert isinstance(saver, _SaveToy)
    assert saver is not registry.entries()[1].create()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (":Newer", r"Newer of toys 1\.0 is registered as \('toy', 1\), but its class attributes name \('toy', 2\)"),
        (":Loader", r"Loader of toys 1\.0 is not a SaveStrategy"),
        (":number", r"number of toys 1\.0 is not a SaveStrategy"),
        (":Exits", r"Exits of toys 1\.0 cannot be created: SystemExit: no licence for libtoy"),
        (":Absent", r"Absent of toys 1\.0 cannot be imported: AttributeError: .*Absent"),
        ("_absent:Saver", r"of toys 1\.0 cannot be imported: ModuleNotFoundError: .*_absent"),
        ("_broken:Saver", r"of toys 1\.0 cannot be imported: RuntimeError: libtoy is too old"),
    ],
)
def test_a_lazy_strategy_that_does_not_match_is_a_plugin_error(lazy: str, target: str, message: str) -> None:
    """What turns out to be absent, broken or something else is named, with who registered it."""
    registry = StrategyRegistry()
    with registry.attribute_to("toys 1.0"):
        registry.add_lazy("toy", 1, save=f"{lazy}{target}")
    with pytest.raises(PluginError, match=message):
        registry.entries()[0].create()


def test_the_newest_migration_comes_first(lazy: str) -> None:
    """Migrations from a version are found newest target first, and a lazy one is imported at first use."""
    registry = StrategyRegistry()
    registry.add_lazy_migration("toy", 1, 2, f"{lazy}:Migrator")
    registry.add_migration(_OneToThree)
    found = registry.migrations("toy", 1)
    assert [migration.to_version for migration in found] == [3, 2]
    assert lazy not in sys.modules
    assert [type(migration.create()).__name__ for migration in found] == ["_OneToThree", "Migrator"]
    assert registry.migrations("toy", 2) == []


def test_add_takes_a_migration() -> None:
    """The one call that authors know registers a migration, too; what it does not take says which call does."""
    registry = StrategyRegistry()
    registry.add(_OneToTwo)
    assert [migration.target for migration in registry.migrations("toy", 1)] == [_OneToTwo]
    for wrong, override in ((_OneToThree(), False), (_OneToThree, True)):
        with pytest.raises(PluginError, match=r"_OneToThree is a migration: .*registry\.add_migration\(_OneToThree\)"):
            registry.add(wrong, override=override)


def test_a_migration_without_its_versions_is_named() -> None:
    """A migration that does not say from where to where it leads is refused with the names that it lacks."""

    class _Lost(Migration):
        backend = "toy"

        def migrate(self, *_: Any) -> None: ...

    with pytest.raises(PluginError, match="_Lost must name as class attributes: from_version, to_version"):
        StrategyRegistry().add_migration(_Lost)
    with pytest.raises(PluginError, match=r"not a subclass of shardckpt\.Migration"):
        StrategyRegistry().add_migration(_SaveToy)  # type: ignore[arg-type]


def test_a_migration_that_does_not_match_is_a_plugin_error(lazy: str) -> None:
    """A lazy migration between other versions than it was registered for, or that names none, is not run."""
    registry = StrategyRegistry()
    registry.add_lazy_migration("toy", 2, 3, f"{lazy}:Migrator")
    with pytest.raises(PluginError, match=r"registered as \('toy', 2, 3\), .* name \('toy', 1, 2\)"):
        registry.migrations("toy", 2)[0].create()
    registry.add_lazy_migration("toy", 3, 4, f"{lazy}:Unversioned")
    with pytest.raises(PluginError, match="Unversioned must name as class attributes: from_version, to_version"):
        registry.migrations("toy", 3)[0].create()


def test_a_duplicate_migration_names_both_sides() -> None:
    """Two migrations between the same versions are refused, naming classes and distributions; the first stays."""
    registry = StrategyRegistry()
    with registry.attribute_to("toys 1.0"):
        registry.add_migration(_OneToTwo)
    with pytest.raises(DuplicateStrategyError) as caught, registry.attribute_to("games 2.3"):
        registry.add_migration(_AnotherOneToTwo)
    for text in ("'toy' from version 1 to 2", "OneToTwo of toys 1.0", "_AnotherOneToTwo of games 2.3"):
        assert text in str(caught.value)
    assert [migration.target for migration in registry.migrations("toy", 1)] == [_OneToTwo]


def test_two_defaults_are_refused_by_name() -> None:
    """Two plugins that both claim the default: an error with both, and the first stays."""
    registry = StrategyRegistry()
    _claim(registry, "toys 1.0", "toy")
    with pytest.raises(DuplicateStrategyError, match=r"\('toy', 1\) of toys 1\.0 and \('game', 1\) of games 2\.3"):
        _claim(registry, "games 2.3", "game")
    assert registry.default == ("toy", 1)


def test_an_empty_registry_says_how_it_is_filled() -> None:
    """Without a default the reason is an installation without entry points, and the error says so."""
    with pytest.raises(PluginError, match=r"`pip install -e \.`"):
        _ = StrategyRegistry().default


@table(
    "wrong",
    [3, ("npy",), ("npy", "1"), (1, "npy"), ["npy", 1], None, ("npy", 1, 2), "npy@", "@1", "npy@x", "npy@-1", ""],
)
def test_a_strategy_is_named_by_text_or_pair(wrong: Any) -> None:
    """What is neither 'backend', 'backend@version' nor ('backend', version) is refused with the expected forms."""
    with pytest.raises(CheckpointingException, match=r"'backend', 'backend@version' or \('backend', version\), not"):
        parse_key(wrong)


def test_a_version_that_is_a_text_is_said_to_be_an_int() -> None:
    """('npy', '1') names a backend with a version, which is an int: the error shows the pair that is meant."""
    for parse in (parse_key, parse_keys):
        for version in ("1", 1.0):
            with pytest.raises(
                CheckpointingException, match=r"\('npy', .*\): the version is an int, as in \('npy', 1\)"
            ):
                parse(("npy", version))


@table(
    ("named", "keys"),
    [
        ("npy", [("npy", None)]),
        ("npy@2", [("npy", 2)]),
        (("npy", 2), [("npy", 2)]),
        (["npy", ("ep", 1), "txt@3"], [("npy", None), ("ep", 1), ("txt", 3)]),
        (("npy", "ep"), [("npy", None), ("ep", None)]),
        ([], []),
    ],
)
def test_one_strategy_or_several_are_named(named: Any, keys: list[tuple[str, int | None]]) -> None:
    """Each form has one meaning: a pair with a number is one strategy, never a backend beside a number."""
    assert parse_keys(named) == keys
    if len(keys) == 1:
        assert parse_key(named) == keys[0]


@table("wrong", [3, ("npy", True), [3], ["npy", 1], ("npy", 1, 2), ("npy", "1"), "npy>=1", "npy, ep"])
def test_what_names_no_strategies_is_refused(wrong: Any) -> None:
    """A number, or a list with one, is an error, and not a list of strategies of which one is left out."""
    with pytest.raises(CheckpointingException, match="a strategy is named as"):
        parse_keys(wrong)


#: What a module of a test waits for while it is imported: that it has begun, and that it may go on.
BEGUN, GO_ON = threading.Event(), threading.Event()


def test_a_strategy_that_another_thread_imports_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is half imported is not taken for one without the class."""
    (tmp_path / "slow_toy.py").write_text(
        "from tests.plugins import test_registry\n"
        "test_registry.BEGUN.set()\n"
        "test_registry.GO_ON.wait(60)\n"
        "class Saver(test_registry._SaveToy):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    BEGUN.clear()
    GO_ON.clear()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(_import_class, "slow_toy:Saver", _SaveToy, "toys 1.0")
        assert BEGUN.wait(60)
        asked = threading.Event()

        def import_again() -> type[Any]:
            asked.set()
            return _import_class("slow_toy:Saver", _SaveToy, "toys 1.0")

        second = threads.submit(import_again)
        assert asked.wait(60)
        GO_ON.set()
        assert first.result() is second.result()
    del sys.modules["slow_toy"]


@table(
    ("call", "match"),
    [
        (lambda path: dc.save({}, path, _SaveToy), r"_SaveToy is a class: give an instance, _SaveToy\(\)"),
        (lambda path: dc.load({}, path, _LoadToy), r"_LoadToy is a class: give an instance, _LoadToy\(\)"),
        (lambda path: dc.save({}, path, _LoadToy()), "_LoadToy is a LoadStrategy, and a SaveStrategy is asked for"),
        (lambda path: dc.load({}, path, _SaveToy()), "_SaveToy is a SaveStrategy, and a LoadStrategy is asked for"),
        (lambda path: dc.save({}, path, _Nameless()), "_Nameless must name its backend .* and version"),
        (lambda path: dc.save({}, path, _NumberedByText()), "_NumberedByText must name its backend .* and version"),
    ],
)
def test_a_strategy_that_is_given_as_an_object_is_checked(call: Any, match: str, tmp_path: Path) -> None:
    """A class, a strategy of the wrong side, and one without a name are refused, with the class and the remedy."""
    dc.save({"step": 1}, tmp_path / "there")
    with pytest.raises(CheckpointingException, match=match):
        call(tmp_path / ("there" if "Load" in match.partition(" ")[0] or "LoadStrategy is asked" in match else "c"))
    assert [each.name for each in tmp_path.iterdir()] == ["there"]


class _MegatronSave:
    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None: ...


def test_a_strategy_of_megatrons_kind_is_sent_to_its_module() -> None:
    """A strategy that takes a checkpoint_dir is not one of the core: the error says which module's save takes it."""
    with pytest.raises(CheckpointingException, match=r"_MegatronSave .* call save or load of shardckpt\.compat\.megat"):
        parse_key(_MegatronSave())


@table("name", ["My Fmt", "a,b", "npy@1", "7", ""])
def test_a_backend_is_called_what_it_can_be_asked_for_by(name: str) -> None:
    """A name of which no text could be made that names it, alone, with a version or in a list, is refused."""
    kind = type("Save", (SaveStrategy,), {"backend": name, "version": 1, "save": lambda *_: None})
    with pytest.raises(PluginError, match=r"a backend cannot be called|is no strategy"):
        StrategyRegistry().add(kind)
