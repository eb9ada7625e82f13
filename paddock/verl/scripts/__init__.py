"""`paddock run SCRIPT`: launch scripts written for verl run here unchanged."""
