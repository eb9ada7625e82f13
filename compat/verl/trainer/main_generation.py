"""Answers to the prompts of a file under verl's name: its keys lead to `paddock generate`."""

import sys

from paddock.trainer.main_verl import main_generation as main

if __name__ == "__main__":
    sys.exit(main())
