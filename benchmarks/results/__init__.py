"""Real models that learn: each experiment is one file, a runner makes its curves, and others draw and tabulate them."""
