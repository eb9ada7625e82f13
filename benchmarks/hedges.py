"""Answers to multiple-choice questions that hedge: how many of them a verdict takes for right.

python benchmarks/hedges.py [--count 100000] [--seed 0] [--judge paddock | math-verify] [--accepted]

Each hedge names two to five options, written as a policy might write them, and is compared with each of these letters.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator

LETTERS = "ABCDEFGHIJ"
WRAPPED = (
    *("{}", "({})", "[{}]", "{{{}}}", "{}.", "{})", "{}:", r"\text{{{}}}", r"\text{{({})}}", r"\textbf{{({})}}"),
    *(
        r"\textbf{{({}) }}",
        r"\mathrm{{{}}}",
        r"\mathbf{{({})}}",
        r"(\text{{{}}})",
        r"(\text{{({})}})",
        "**{}**",
        "${}$",
    ),
    *(
        r"\left({}\right)",
        "（{}）",
        "[({})]",
        r"\boxed{{{}}}",
        r"\fbox{{{}}}",
        r"\underline{{{}}}",
        r"\({}\)",
        "({}) 12",
    ),
    *("x={}", "x=({})", r"x=\text{{({})}}", "answer: {}", "Answer is {}", r"\text{{answer: }} {}", "option {}"),
    *("{}^{{1}}", "{}+0", r"1\cdot {}", r"\{{{}\}}", "|{}|", r"{{\color{{red}}{}}}", r"\lim_{{x\to 0}} {}", "{}'"),
)
BETWEEN = (
    *(
        " ",
        "  ",
        ", ",
        "; ",
        "\n",
        "\\\\",
        r"\ ",
        r"\,",
        r"\quad ",
        r"\qquad ",
        "~",
        " and ",
        " or ",
        " / ",
        ". ",
        ": ",
    ),
    *(
        r"\text{ or }",
        r"\text{ and }",
        r" \lor ",
        r" \land ",
        r"\cup ",
        r"\vee ",
        "=",
        r"\equiv ",
        r"\approx ",
        "|",
        "&",
    ),
    *(
        "-",
        "+",
        r"\cdot ",
        r"\to ",
        r"\Rightarrow ",
        "? ",
        "! ",
        " not ",
        " maybe ",
        " then ",
        ". Answer: ",
        "⇒",
        "、",
        "{}",
    ),
    *(
        r" \text{ wait } ",
        r"\\text{,}",
        " 12 ",
        " x=",
        r"\phantom{x}",
        r"\hspace{1em}",
        r"\pm ",
        r"\in ",
        "<",
        r"\neq ",
    ),
)
AROUND = (
    *("{}", "${}$", r"\text{{{}}}", r"\textbf{{{}}}", "({})", r"\{{{}\}}", "[{}]", r"\boxed{{{}}}", "The answer is {}"),
    *("answer: {}", "x={}", r"\begin{{pmatrix}}{}\end{{pmatrix}}", r"\frac{{{}}}{{1}}", r"\left({}\right)", "{} 12"),
    *(r"\text{{The final answer is }} {}", r"\sqrt{{({})^2}}", "12 {}", r"\sum_{{k=1}}^{{1}} {}", r"\text{{}}{}"),
)


def hedges(count: int, seed: int) -> Iterator[tuple[str, list[str]]]:
    """Yields texts with the letters that they name."""
    draw = random.Random(seed)
    for _ in range(count):
        letters = draw.sample(LETTERS, draw.choice((2, 2, 2, 3, 4, 5)))
        text = draw.choice(WRAPPED).format(letters[0])
        wrap, between = draw.choice(WRAPPED), draw.choice(BETWEEN)
        for letter in letters[1:]:
            if draw.random() < 0.5:
                wrap = draw.choice(WRAPPED)
            if draw.random() < 0.3:
                between = draw.choice(BETWEEN)
            text += between + wrap.format(letter)
        yield draw.choice(AROUND).format(text) if draw.random() < 0.3 else text, letters


def main() -> None:
    from answers import JUDGES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judge", choices=JUDGES, default="paddock")
    parser.add_argument("--accepted", action="store_true", help="list the hedges that were accepted")
    args = parser.parse_args()
    judge = JUDGES[args.judge]()
    begin, accepted, of_two = time.perf_counter(), 0, 0
    for text, letters in hedges(args.count, args.seed):
        right = [letter for letter in letters if judge("choice", letter, text)]
        accepted += bool(right)
        of_two += len(right) > 1
        if right and args.accepted:
            print(f"{text!r} is taken for {', '.join(right)}")
    print(
        f"{args.judge}, {args.count:,} hedges: {accepted:,} accepted, {of_two:,} of them for several truths; "
        f"{time.perf_counter() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
