"""python3 -m verl.trainer.main_ppo"""

import sys

from paddock.commands.train import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
