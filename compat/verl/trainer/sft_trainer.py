"""Supervised training on conversations under verl's name: its keys lead to `paddock sft`."""

import sys

from paddock.verl.main import sft_trainer as main

if __name__ == "__main__":
    sys.exit(main())
