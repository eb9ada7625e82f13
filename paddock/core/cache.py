"""Where work that would be done again is kept between runs."""

from __future__ import annotations

from paddock.facts.machine import cache_folder as cache_folder
