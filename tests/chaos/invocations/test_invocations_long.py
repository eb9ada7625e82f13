"""Every bad invocation of the catalogue, each by the real command in a process that is killed if it takes too long."""

from __future__ import annotations

import pytest
from invocation_catalogue import CASES, tried

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}: {case.title}")
def test_a_mistake_is_answered_with_key_value_reason_and_fix(case, tmp_path):
    assert tried(case, tmp_path / "here").problems(case) == []
