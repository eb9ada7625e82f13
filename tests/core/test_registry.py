from __future__ import annotations

import pytest

from paddock.core.registry import Registry
from paddock.errors import UserError


def test_names_and_aliases_lead_to_the_same_object():
    tools: Registry[object] = Registry("tool")
    hammer = object()
    assert tools.register("hammer", "mallet")(hammer) is hammer
    assert tools.get("hammer") is tools.get("mallet") is hammer
    assert tools.names() == ["hammer", "mallet"]
    assert "hammer" in tools and "saw" not in tools


def test_an_unknown_name_is_answered_with_the_closest_one_and_all_of_them():
    tools: Registry[int] = Registry("tool", key="bench.tool")
    tools.register("hammer")(1)
    tools.register("saw")(2)
    with pytest.raises(UserError) as caught:
        tools.get("hamer")
    assert caught.value.key == "bench.tool" and caught.value.value == "hamer"
    assert "did you mean 'hammer'?" in str(caught.value) and "saw" in str(caught.value)


def test_a_name_is_given_away_once_but_the_same_object_may_come_again():
    tools: Registry[object] = Registry("tool")
    first = object()
    tools.register("saw")(first)
    tools.register("saw")(first)
    with pytest.raises(ValueError, match="registered already"):
        tools.register("saw")(object())
