"""verl's later name of its synchronous trainer: the same door as `main_ppo`, as there is one trainer here."""

import sys

from paddock.commands.train import main

if __name__ == "__main__":
    sys.exit(main())
