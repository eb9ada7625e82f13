"""`python -m paddock`: the command, where its script is not on the PATH."""

import sys

from paddock.cli import main

sys.exit(main())
