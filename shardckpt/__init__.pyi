from shardckpt import dist_checkpointing as dist_checkpointing
from shardckpt.archive import decode_object as decode_object
from shardckpt.archive import encode_object as encode_object
from shardckpt.errors import CheckpointingException as CheckpointingException
from shardckpt.maintenance import fingerprint as fingerprint
from shardckpt.mapping import LocalNonpersistentObject as LocalNonpersistentObject
from shardckpt.mapping import ShardedObject as ShardedObject
from shardckpt.mapping import ShardedTensor as ShardedTensor
from shardckpt.mapping import ShardedTensorFactory as ShardedTensorFactory
from shardckpt.plugins import Event as Event
from shardckpt.plugins import hookimpl as hookimpl
from shardckpt.storage import CheckpointReader as CheckpointReader
from shardckpt.storage import CheckpointWriter as CheckpointWriter
from shardckpt.storage import FileWriter as FileWriter
from shardckpt.strategy import AsyncSaveStrategy as AsyncSaveStrategy
from shardckpt.strategy import BackgroundWork as BackgroundWork
from shardckpt.strategy import LoadContext as LoadContext
from shardckpt.strategy import LoadStrategy as LoadStrategy
from shardckpt.strategy import Migration as Migration
from shardckpt.strategy import PlanContext as PlanContext
from shardckpt.strategy import PreparedSave as PreparedSave
from shardckpt.strategy import SaveContext as SaveContext
from shardckpt.strategy import SaveStrategy as SaveStrategy

__version__: str
from shardckpt.chunks import ChunkLoadStrategy as ChunkLoadStrategy
from shardckpt.chunks import StoredChunk as StoredChunk
