"""What runs in and around the walls. Standard library only, and imports among itself are relative: the folder is all
that is shown of the project inside, where it goes by the name `inside`."""
