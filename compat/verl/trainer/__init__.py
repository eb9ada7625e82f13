"""Doors and formulas under the paths that scripts and plug-ins import."""
