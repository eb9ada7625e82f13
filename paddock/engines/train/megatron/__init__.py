"""The backend on megatron-core, and the only package that imports it; `backend.py` is its entry point."""

import logging
import warnings

logging.getLogger("megatron").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", "Transformer Engine and Apex are not installed")  # layers here need neither
