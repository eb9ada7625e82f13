"""Scores of answers that a file holds, under verl's name."""

import sys

from paddock.verl.main import main_eval as main

if __name__ == "__main__":
    sys.exit(main())
