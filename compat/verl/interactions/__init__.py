"""Interactions under verl's names; `paddock.verl.tools` runs them."""
