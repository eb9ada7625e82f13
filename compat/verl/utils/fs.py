"""Files under verl's names, in the module that later versions have."""

from verl.utils.hdfs_io import copy, exists, makedirs

__all__ = ["copy", "exists", "makedirs"]
