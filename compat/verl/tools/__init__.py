"""Tools under verl's names; `paddock.verl.tools` runs them."""
