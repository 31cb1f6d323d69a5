"""Objects as bytes without pickles: by the codecs of FORMAT.md, and by codecs that users register for their classes."""

from shardckpt_safetensors.objects.codecs import register_codec
from shardckpt_safetensors.objects.payload import decode_object, decode_tree_file, encode_object, encode_tree_file
from shardckpt_safetensors.objects.tensor_file import parse_tree_head

__all__ = [
    "decode_object",
    "decode_tree_file",
    "encode_object",
    "encode_tree_file",
    "parse_tree_head",
    "register_codec",
]
