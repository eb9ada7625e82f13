"""Answers to the prompts of a file under verl's name: its keys lead to `paddock generate`."""

import sys

from paddock.verl.main import main_generation as main

if __name__ == "__main__":
    sys.exit(main())
