"""Help on the command line: a page for each command, a search over all keys, and shell completion."""
