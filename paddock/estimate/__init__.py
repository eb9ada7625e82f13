"""What a run takes of a device's memory, by its config: `paddock plan` prints it, and unset token budgets follow it."""
