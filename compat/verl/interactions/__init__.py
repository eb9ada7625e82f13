"""Interactions under verl's names; `paddock.environments.verl_tools` runs them."""
