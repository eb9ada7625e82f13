"""Make the embedded model of the built-in tool task: `builtin:tiny` after a supervised warm start on conversations.

    python tools/make_tiny_tools.py [--out paddock/assets/tiny-tools]

Half of the conversations call the tool and half guess, so that it calls the tool about every second time, and about one
sampled answer in five is right; reinforcement learning takes it from there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import paddock

KEYS = {"data.train_files": "builtin:products/turns", "data.val_files": None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "paddock/assets/tiny-tools")
    out = parser.parse_args().out.absolute()
    with tempfile.TemporaryDirectory() as folder:
        how = {"batch": 64, "steps": 300, "lr": 1e-3, "prompt_length": 16, "response_length": 40, "logger": ["file"]}
        with paddock.Run("builtin:tiny", algorithm="sft", folder=folder, config=KEYS, **how) as run:
            run.train()
            run.export(out)
    print(f"the model is in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
