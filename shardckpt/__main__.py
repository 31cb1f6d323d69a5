"""``python -m shardckpt``."""

from __future__ import annotations

import sys

from shardckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
