"""Not SGLang: its server's protocol as recorded from version 0.5, in front of a transformers model on a CPU.

Tests put this folder on PYTHONPATH of the server that the adapter starts. Unlike SGLang it refuses fields that it does
not know, and forgets what a real one forgets: weights while memory is released, a prefix cache when it is flushed.
"""

__version__ = "0.5.5"
