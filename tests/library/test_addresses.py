"""Functions of a program get addresses by which processes import them, wherever a module binds them to a name."""

import importable_rewards

from paddock.library.functions import addresses_of


def test_a_closure_that_a_module_binds_to_a_name_is_imported_by_that_name():
    assert addresses_of([importable_rewards.doubled]) == (["pkg://importable_rewards:doubled"], {})
    unbound = importable_rewards.scaled(3)
    assert addresses_of([unbound]) == (["python:score"], {"score": unbound})
