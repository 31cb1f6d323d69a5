"""The module that a reader of ``shardckpt/plugins/README.md`` has written."""

from tests.readmes import EXAMPLES

for _name in ("json-strategy", "json-version-2"):
    exec(compile(EXAMPLES[_name].code, _name, "exec"), globals())
