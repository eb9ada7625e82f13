r"""One spelling for each sign: LaTeX commands, Unicode and plain text become the same characters.

`\left( \dfrac12,\, 1{,}000 \right]` -> `( \frac12, 1000 ]`, `x \geqslant √3` -> `x ≥ \sqrt{3}`. Set braces become
`⦃ ⦄`, so that `{ }` only groups, and a matrix is `⟦1 & 2 ⏎ 3 & 4⟧`. Words in `\text{...}` stay as they are.
"""

from __future__ import annotations

import re

SYMBOLS = {
    "≤": "le leq leqslant leqq",
    "≥": "ge geq geqslant geqq",
    "<": "lt",
    ">": "gt",
    "≠": "ne neq",
    "≈": "approx simeq",
    "≡": "equiv",
    "∈": "in",
    "∪": "cup",
    "∩": "cap",
    "∖": "setminus backslash smallsetminus",
    "∞": "infty infin",
    "±": "pm",
    "∓": "mp",
    "*": "cdot times ast cdotp",
    "/": "div",
    "°": "circ degree",
    "⌊": "lfloor",
    "⌋": "rfloor",
    "⌈": "lceil",
    "⌉": "rceil",
    "⟨": "langle",
    "⟩": "rangle",
    "⦃": "lbrace",
    "⦄": "rbrace",
    "[": "lbrack",
    "]": "rbrack",
    "|": "vert lvert rvert mid",
    "…": "ldots dots cdots dotsc",
    ":": "colon",
    "∅": "emptyset varnothing",
    "'": "prime",
    " and ": "land wedge",
    " or ": "lor vee",
    r"\frac": "dfrac tfrac cfrac",
    r"\binom": "dbinom tbinom",
    r"\epsilon ": "varepsilon",
    r"\phi ": "varphi",
    r"\theta ": "vartheta",
    r"\overline": "bar overbar",
    "": "displaystyle textstyle limits left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr "
    "rm bf it mathstrut nolimits",
    " ": "quad qquad thinspace enspace",
}
COMMANDS = {name: sign for sign, names in SYMBOLS.items() for name in names.split()}
COMMAND = re.compile(r"\\([A-Za-z]+)\s*")
UNICODE = str.maketrans(
    {
        **dict.fromkeys("−–—", "-"),
        **dict.fromkeys("×·⋅∙✕∗", "*"),
        **{"÷": "/", "∕": "/", "⁄": "/", "，": ",", "、": ",", "（": "(", "）": ")", "：": ":", "；": ";", "％": "%"},
        **{
            "⩽": "≤",
            "⩾": "≥",
            "≦": "≤",
            "≧": "≥",
            "º": "°",
            "∼": "≈",
            "′": "'",
            "’": "'",
            "∶": ":",
            "＝": "=",
            "。": "",
        },
        **{"½": r"\frac12", "⅓": r"\frac13", "⅔": r"\frac23", "¼": r"\frac14", "¾": r"\frac34", "⅛": r"\frac18"},
        **{"π": r"\pi ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "θ": r"\theta ", "λ": r"\lambda "},
        **{"μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ", "σ": r"\sigma ", "δ": r"\delta ", "ε": r"\epsilon "},
        **{"\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2007": " ", "\u200b": "", "\u2212": "-"},
    }
)
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ", "0123456789-n")
SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ]+")
TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|mathrm|mbox|hbox|operatorname|mathsf)\*?\s*\{([^{}]*)\}")
FONT = re.compile(
    r"\\(?:math(?:bf|it|cal|frak|scr)|boldsymbol|bm|vec|overrightarrow|hat|underline)\s*(?=[{\\A-Za-z])"
    r"|\\(?:text)?color\s*\{[^{}]*\}"
)
NUMBER_SET = re.compile(r"\\(?:mathbb|Bbb|mathbf)\s*\{?\s*([RZNQC])\s*\}?")
NUMBER_SETS = dict(zip("RZNQC", "ℝℤℕℚℂ", strict=True))
THIN = re.compile(r"(?<=\d)(?:\s*,\s*\\!\s*|\s*(?:\\[,!:;> ]|~)+\s*|\s*\{\s*,\s*\}\s*)(?=\d{3}(?!\d))")
BLANKS = re.compile(r"(?<![\d.\w])\d{1,3}(?: \d{3})+(?![\d/])")
DECIMAL_COMMA = re.compile(r"(?<=\d)\{\s*,\s*\}(?=\d)")
SPACING = re.compile(r"\\[,:;> ]|~|\s+")
ROOT = re.compile(r"√\s*(\d+(?:\.\d+)?)?")
PLAIN = re.compile(
    r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log|pi|(?:negative )?infinity|infty|oo)"
    r"(?![A-Za-z])"
)
ENDLESS = {"infinity": "∞", "infty": "∞", "oo": "∞", "negative infinity": "-∞"}
PLAIN_SIGNS = {"<=": "≤", ">=": "≥", "!=": "≠", "+/-": "±", "+-": "±", "~=": "≈", "**": "^", "==": "="}
SIGNS = re.compile("|".join(map(re.escape, PLAIN_SIGNS)))
DEGREE = re.compile(r"\^\s*(?:\{\s*°\s*\}|°)|(?<=\d)\s*°")
ORDINAL = re.compile(r"(?<=\d)\s*\^?\s*\{?\s*(?:\\text\{\s*)?(?:st|nd|rd|th)\s*\}{0,2}$")
TIMES = {
    "hundred": "100",
    "thousand": "1000",
    "million": "10^{6}",
    "billion": "10^{9}",
    "trillion": "10^{12}",
    "dozen": "12",
}
LARGE = re.compile(rf"(?<=[\d}}])\s*(\\text\{{)?\s*({'|'.join(TIMES)})\b(?(1)([^{{}}]*)\}}|())", re.IGNORECASE)
CHOSEN = re.compile(
    r"(?:\{\s*\})?\s*[_^]\s*\{?\s*(\d+)\s*\}?\s*C\s*_\s*\{?\s*(\d+)\s*\}?|(?<![A-Za-z])C_\{?(\d+)\}?\^\{?(\d+)\}?"
)
BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{(.*)\}", re.DOTALL)
DOUBLED = re.compile(r"\\\\(?=[A-Za-z])")  # a backslash that was escaped once too often
ROW = "⏎"  # ends a matrix's row
MATRIX = re.compile(r"\\begin\s*\{(?:[pbB]|small)?(?:matrix|array)\}(?:\s*\{[clr|\s]*\})?")
MATRIX_END = re.compile(r"\\end\s*\{(?:[pbB]|small)?(?:matrix|array)\}")
ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{(?:align|aligned|equation|gather|gathered)\*?\}")


def canonical(text: str) -> str:
    """Returns the answer in one notation, without what surrounds it in prose."""
    text = _unwrapped(text.translate(UNICODE).replace("...", "…"))
    text = SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(RAISED)}}}", text)
    text = ENVIRONMENT.sub("", text)
    text = MATRIX.sub("⟦", text)
    text = MATRIX_END.sub("⟧", text).replace(r"\hline", "")
    if "⟦" not in text and "matrix" not in text and "cases" not in text:
        text = DOUBLED.sub(r"\\", text)
    text = text.replace(r"\\", ROW)
    text = CHOSEN.sub(_binomial, text)
    text = NUMBER_SET.sub(lambda match: NUMBER_SETS[match[1]], text)
    text = DECIMAL_COMMA.sub(".", THIN.sub("", text)).replace(r"\!", "")
    text = text.replace(r"\{", "⦃").replace(r"\}", "⦄").replace(r"\%", "%").replace(r"\|", "|")
    pieces, end = [], 0
    for match in TEXT.finditer(text):
        pieces += [_signs(text[end : match.start()]), _text(match[1])]
        end = match.end()
    text = re.sub(" {2,}", " ", "".join([*pieces, _signs(text[end:])]))  # patterns below try every split of blanks
    text = BLANKS.sub(lambda match: match[0].replace(" ", ""), text)
    text = ORDINAL.sub("", DEGREE.sub("°", LARGE.sub(_multiplied, text)))
    return text.strip(" ,;").rstrip(".").strip()


def _binomial(match: re.Match[str]) -> str:
    """`{}_{10}C_3`, `^{10}C_3` and `C_{10}^3`, which all are 10 over 3."""
    above, below = (group for group in match.groups() if group)
    return rf"\binom{{{above}}}{{{below}}}"


def _multiplied(match: re.Match[str]) -> str:
    r"""`5\text{ million dollars}` -> `5*10^{6}\text{dollars}`"""
    words = (match[3] or "").strip()
    return f"*{TIMES[match[2].lower()]}" + (rf"\text{{{words}}}" if words else "")


def _unwrapped(text: str) -> str:
    r"""`**$\boxed{5}$.**` -> `5`; a single `$` before a number stays, as `\$`."""
    before = None
    while text != before:
        before = text
        text = text.strip(" \t\r\n*").rstrip(".,;").strip()
        if text.endswith("\\"):  # of `5.\ ` or `5\,`
            text = text[:-1]
        for opening, closing in (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            if len(text) > len(opening) and text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : -len(closing)]
        if (whole := BOXED.fullmatch(text)) and _closed(whole[1]):
            text = whole[1]
    dollars = re.findall(r"(?<!\\)\$", text)
    if len(dollars) % 2:
        return re.sub(r"(?<!\\)\$\s*(?=-?[\d.])", r"\\$", text)
    return re.sub(r"(?<!\\)\$", " ", text) if dollars else text


def _closed(text: str) -> bool:
    """True if no brace closes what it did not open: `1} + \\boxed{2` is two boxes."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth < 0:
            return False
    return depth == 0


def _text(words: str) -> str:
    """A single letter, a number or a colon in a text font is mathematics."""
    inside = words.strip()
    return f" {inside} " if re.fullmatch(r"[A-Za-z]|[\d.,:]+", inside) else rf"\text{{{words}}}"


def _signs(text: str) -> str:
    text = FONT.sub("", text).replace("{:}", ":")
    text = COMMAND.sub(_command, text)
    text = SPACING.sub(" ", text)
    text = SIGNS.sub(lambda match: PLAIN_SIGNS[match[0]], text)
    text = ROOT.sub(lambda match: rf"\sqrt{{{match[1]}}}" if match[1] else r"\sqrt", text)
    return PLAIN.sub(lambda match: ENDLESS.get(match[1], rf"\{match[1]} "), text)


def _command(match: re.Match[str]) -> str:
    name = match[1]
    if name in COMMANDS:
        return COMMANDS[name]
    return rf"\{name} " if match[0] != rf"\{name}" else match[0]
