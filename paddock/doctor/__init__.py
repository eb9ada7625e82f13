"""`paddock doctor`: looks at this machine and says what it can do."""
