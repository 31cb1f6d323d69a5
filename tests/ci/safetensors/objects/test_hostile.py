from __future__ import annotations

import base64
import subprocess
import sys

import torch

from shardckpt_safetensors.objects import encode_object
from tests.safetensors.objects.hostile import WHAT


def test_numpy_is_imported_only_for_its_values() -> None:
    """A reader without numpy loads what has no values of numpy: nothing imports it."""
    payload = base64.b64encode(encode_object({"a": torch.ones(2), "b": b"x" * 5000}, WHAT)[1]).decode()
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "import base64; from shardckpt_safetensors.objects import *\n"
        f"value = decode_object('safetensors', base64.b64decode('{payload}'), 'it')\n"
        "assert encode_object(value, 'it')[1] == base64.b64decode(" + repr(payload) + ")"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
