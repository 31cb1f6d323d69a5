from shardckpt.deepspeed.files import find_files as find_files
from shardckpt.deepspeed.load import DeepSpeedLoadStrategy as DeepSpeedLoadStrategy
