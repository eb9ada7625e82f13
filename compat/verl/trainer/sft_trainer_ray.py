"""Supervised training through Ray under verl's name: the same as `sft_trainer`."""

import sys

from paddock.verl.main import sft_trainer as main

if __name__ == "__main__":
    sys.exit(main())
