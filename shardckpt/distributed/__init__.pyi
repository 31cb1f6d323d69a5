from shardckpt.distributed.comm import Comm as Comm
from shardckpt.distributed.error_report import ErrorReport as ErrorReport
from shardckpt.distributed.error_report import replace_text as replace_text
from shardckpt.distributed.routing import find_owner as find_owner
