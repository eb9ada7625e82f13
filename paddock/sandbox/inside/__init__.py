"""What runs in an isolated cell, and what isolates it. Standard library only, and relative imports: the folder is
all that a cell sees of the project, under the name `inside`."""
