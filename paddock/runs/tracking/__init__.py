from paddock.runs.tracking.tracker import Tracker

__all__ = ["Tracker"]
