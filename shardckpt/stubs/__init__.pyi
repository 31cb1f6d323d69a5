from shardckpt.stubs.stub import Stub as Stub
from shardckpt.stubs.stub import find_imported as find_imported
from shardckpt.stubs.stub import make_stub_class as make_stub_class
