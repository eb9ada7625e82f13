"""Training with megatron-core. The only room that imports it; `engine.py` is its door."""

import logging
import warnings

logging.getLogger("megatron").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", "Transformer Engine and Apex are not installed")  # layers here need neither
