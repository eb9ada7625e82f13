r"""Units of measure at the end of an answer: `12\text{ cm}^2`, `5 square meters`, `\$18`, `50\%`, `90°`.

A unit on one side only is forgiven: data sets drop it. Two units must be the same: `5 m` is not `5 kg`, and nothing is
converted. Any other noun only says what was counted: `5 apples` is `5 oranges`, as `3 ways` is `3 possible ways`.
"""

from __future__ import annotations

import re

NAMES = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "dm": "dm decimeter decimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "mg": "mg milligram",
    "g": "g gm gram",
    "kg": "kg kilogram kilo",
    "lb": "lb lbs pound",
    "oz": "oz ounce",
    "t": "tonne ton",
    "ml": "ml mL milliliter millilitre",
    "l": "l L liter litre",
    "gal": "gal gallon",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "yr year",
    "mph": "mph",
    "km/h": "kmh kph kmph",
    "dollar": "dollar usd USD buck",
    "cent": "cent",
    "euro": "euro EUR",
    "rupee": "rupee rs Rs",
    "yuan": "yuan RMB",
    "degree": "degree deg",
    "radian": "radian rad",
    "%": "percent percentage pct",
    "ohm": "ohm",
    "N": "N newton",
    "J": "J joule",
    "W": "W watt",
    "V": "V volt",
    "Hz": "Hz hertz",
    "Pa": "Pa pascal",
    "acre": "acre",
    "hectare": "hectare ha",
}
UNIT_OF = {name: unit for unit, names in NAMES.items() for name in names.split()}
UNIT_OF |= {f"{name}s": unit for name, unit in UNIT_OF.items() if len(name) > 2}
SAME = {"mi/h": "mph", "m*m": "m^2"}
SHORT = "mm|cm|dm|km|kg|mg|ft|mph|km/h|lbs|lb|oz|ml|mL|yd|hr|min|sec"
SPACED = rf"{SHORT}|m|g|mi|(?:m|cm|km|ft) ?/ ?(?:s|h|min)|in|s|h|L|ha|\\Omega"
POWER = r"(?: ?\^ ?\{? ?([23]) ?\}?)?"
AFTER_NUMBER = re.compile(rf"(-?[\d.,]+|\S.*(?:[}})\d]|\\pi))(?: ?({SHORT})| ({SPACED})){POWER}")
TEXT_UNIT = re.compile(
    rf"(.*[^\s+*/=<>^_(\[{{-])((?:\s*(?:/ ?|per )?\\text\{{[^{{}}]*\}}{POWER}\s*(?:/ ?[a-z]+{POWER})?)+)"
)
WORDS = re.compile(r"(.*?[\d})\]A-Za-z!%°])\s((?:[A-Za-z][A-Za-z./-]*)(?: [A-Za-z./-]+)*)\s*" + POWER)
SIGNS = {"%": "%", "°": "degree", "€": "euro", "£": "gbp", "¥": "yen", "Rs": "rupee", "Rs.": "rupee"}
CHINESE_UNITS = {
    **{"毫米": "mm", "厘米": "cm", "分米": "dm", "米": "m", "千米": "km", "公里": "km", "克": "g", "千克": "kg"},
    **{"公斤": "kg", "吨": "t", "毫升": "ml", "升": "l", "秒": "s", "分钟": "min", "小时": "h", "天": "day"},
    **{"周": "week", "月": "month", "年": "year", "元": "yuan", "美元": "dollar", "度": "degree"},
}
CHINESE = re.compile(r"(.*[\d})\]!%])\s*(?:\\text\{\s*)?([\u4e00-\u9fff]{1,2})\s*\}?")
CHINESE_NOT_NOUNS = frozenset("十百千万亿半倍多余几分成或和与加减乘除不非")
"""Signs that change the number or its meaning: `5万` is 50,000."""
MONEY = re.compile(r"(-?)\s*(?:(?:\\\$|\$|US\\?\$|USD)|(€|£|¥|Rs\.?))\s*(.+)")
TEMPERATURE = re.compile(r"(.*\d.*)°\s*(?:\\text\{)?\s*([CFK])\s*\}?")
NOT_NOUNS = """and or to if sin cos tan log ln mod not but except plus minus times over divided point half third quarter
than less more negative maybe perhaps possibly through until either neither is are was were isn wrong too nor"""
NEVER = frozenset(NOT_NOUNS.split())
"""Words after which the number is not the answer: `5 or 6`, `5 and a half`, `5 less than x`."""


def without_unit(text: str) -> tuple[str, str | None]:
    """Returns the expression, and its unit in one spelling; None if there is none, or only a noun."""
    text = text.strip()
    if match := MONEY.fullmatch(text):
        rest, unit = without_unit(match[3])
        return match[1] + rest, SIGNS[match[2]] if match[2] else unit if unit == "cent" else "dollar"
    if match := TEMPERATURE.fullmatch(text):
        return match[1].strip(), f"degree {match[2]}"
    if text.endswith(r"\$") and len(text) > 2:
        return text[:-2].strip(), "dollar"
    if (match := CHINESE.fullmatch(text)) and (match[2] in CHINESE_UNITS or not CHINESE_NOT_NOUNS & set(match[2])):
        return match[1].strip(), CHINESE_UNITS.get(match[2])
    if len(text) > 1 and text[-1] in SIGNS and not re.search(r"(?:sin|cos|tan|cot|sec|csc)", text):
        return text[:-1].strip(), SIGNS[text[-1]]
    if (match := TEXT_UNIT.fullmatch(text)) and r"\text" not in match[1] and _only_names(match[2]):
        unit = canonical_unit(match[2])
        return (match[1].strip(), unit) if unit else without_unit(match[1])  # `20%\\text{ increase}`
    if match := AFTER_NUMBER.fullmatch(text):
        return match[1].strip(), canonical_unit(f"{match[2] or match[3]}^{match[4] or 1}")
    if (match := WORDS.fullmatch(text)) and _is_noun(match[2]):
        return match[1].strip(), canonical_unit(match[2] + (f"^{match[3]}" if match[3] else ""))
    return text, None


def _is_noun(words: str) -> bool:
    """Words, not a product of letters: `5 x y` and `n a` are products."""
    return max(map(len, words.split())) > 2 and _only_names(words)


def _only_names(words: str) -> bool:
    """True if these words name a unit or what is counted, and say nothing else."""
    said = re.sub(r"\^ ?\{? ?[23] ?\}?", "", words.replace(r"\text", " "))
    return not re.search(r"[\d=<>+*\u4e00-\u9fff]", said) and not NEVER & set(re.findall(r"[a-z]+", said.lower()))


def canonical_unit(text: str) -> str | None:
    r"""` square meters`, `\text{ m}^2`, `sq. m` -> `m^2`; `\text{ km/h}`, `kilometers per hour` -> `km/h`."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    for sign, name in (("per cent", "percent"), ("%", " percent "), ("°", " degree "), (r"\Omega", " ohm ")):
        text = text.replace(sign, name)
    text = re.sub(r"\bper\b|\ban?\b(?= [a-z]+$)", "/", text).replace("/", " / ")
    text = re.sub(r"\s*\^\s*", "^", re.sub(r"[{}]", "", text.replace(".", " ")))
    spelled, power = "", ""
    for word in text.split():
        name, _, exponent = word.partition("^")
        if word == "/":
            spelled += "/" if spelled else ""
        elif name.lower() in ("square", "sq", "squared"):
            power = "2"
            if name.lower() == "squared" and spelled:
                spelled, power = f"{spelled}^2", ""
        elif name.lower() in ("cubic", "cu", "cubed"):
            power = "3"
        elif unit := UNIT_OF.get(name) or UNIT_OF.get(name.lower()):
            times = power or (exponent if exponent not in ("", "1") else "")
            spelled += unit + (f"^{times}" if times else "")
            power = ""
    spelled = spelled.strip("/")
    return SAME.get(spelled, spelled) or None
