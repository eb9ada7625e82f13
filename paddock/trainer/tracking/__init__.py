from paddock.trainer.tracking.tracker import Tracker

__all__ = ["Tracker"]
