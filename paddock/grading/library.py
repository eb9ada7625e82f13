r"""math-verify, asked about the notation that `reader.py` does not have: sums, integrals, limits, determinants."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

from math_verify import LatexExtractionConfig, parse, verify

from paddock.grading.limits import TooLarge

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once a process that its time-outs are off

KNOWN = re.compile(r"\\(?:sum|int|iint|prod|lim|det|arg|Re|Im|begin *\{[vV]matrix\})(?![a-z])")
"""Commands that it reads and we do not. On other text it guesses, and guesses `4210_8` = `4210`."""
LARGE = re.compile(r"\d{20}|\d{4,} *\}? *!|\^ *\{? *\d{4}|\^[^^]*\^[^^]*\^|! *\)* *!|_ *\{[^}]*\} *\^ *\{? *\d{5}")
"""What SymPy would compute in one call that nothing interrupts."""
LONGEST = 300  # characters
CONFIG = LatexExtractionConfig()
CONFIG = replace(CONFIG, normalization_config=replace(CONFIG.normalization_config, units=False))  # `3t` is not `3`
LATEX = str.maketrans(
    {
        "≤": r"\leq ",
        "≥": r"\geq ",
        "∞": r"\infty ",
        "*": r"\cdot ",
        "⦃": r"\{",
        "⦄": r"\}",
        "⏎": r"\\",
        "°": r"^\circ ",
    }
)


def equal(truth: str, answer: str) -> bool:
    """True if the two are equal; both are in canonical notation."""
    if not (KNOWN.search(truth) or KNOWN.search(answer)):
        return False
    texts = [text.translate(LATEX) for text in (truth, answer)]
    if any(len(text) > LONGEST or LARGE.search(text) for text in texts):
        raise TooLarge("for math-verify")
    expected, given = (parse(f"${text}$", [CONFIG], parsing_timeout=None) for text in texts)
    return bool(verify(expected, given, float_rounding=12, timeout_seconds=None))
