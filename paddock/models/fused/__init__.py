"""A decoder's forward in few kernels; see decoder.py."""

from paddock.models.fused.decoder import FusedDecoder, fuse, fused

__all__ = ["FusedDecoder", "fuse", "fused"]
