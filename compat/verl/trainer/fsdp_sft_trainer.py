"""Supervised training under verl's name: its keys lead to `paddock sft`."""

import sys

from paddock.verl.main import fsdp_sft_trainer as main

if __name__ == "__main__":
    sys.exit(main())
