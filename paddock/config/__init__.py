"""One config for every run: schema, overrides, recipes, rules. Imports no torch: a wrong key is answered at once."""
