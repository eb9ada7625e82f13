"""Write text calls of a calculator for SFT: the same as `paddock data gsm8k_calculator_text_sft`. See README.md."""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))

if __name__ == "__main__":
    # Python puts this folder first on its path, where math.py would hide the standard library's math.
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder or os.curdir) != HERE]

    from importlib.util import find_spec

    if find_spec("paddock") is None:
        sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

    from paddock.data.prepare import main

    sys.exit(main("gsm8k_calculator_text_sft", sys.argv[1:]))
