"""Paddock as a library: `Run` and what stands around it. `import paddock` gives these names without importing torch."""
