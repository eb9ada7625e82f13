"""python3 -m verl.model_merger merge --backend fsdp --local_dir CHECKPOINT --target_dir FOLDER"""

import sys

from paddock.verl.merger import main

if __name__ == "__main__":
    sys.exit(main())
