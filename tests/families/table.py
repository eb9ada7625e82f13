"""The matrix of families and features: `python -m tests.families.table` runs it and writes it into docs/models.md."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from features import FEATURES, NotThere  # noqa: E402
from specimens import FAMILIES, TITLES, Specimen  # noqa: E402

from paddock.errors import UserError  # noqa: E402

PAGE = HERE.parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- matrix: written by `python -m tests.families.table` -->", "<!-- end of the matrix -->"
WORKS, REFUSED, NOT_THERE = "works", "refused: ", "-"

Table = dict[str, dict[str, str]]


def outcome(family: str, feature: str, root: Path) -> str:
    """A cell. What fails in any other way is a bug, and shows its traceback."""
    try:
        FEATURES[feature][1](Specimen.of(family, root))
    except UserError as error:
        return REFUSED + error.reason
    except NotThere:
        return NOT_THERE
    return WORKS


def measured(root: Path) -> Table:
    return {family: {feature: outcome(family, feature, root) for feature in FEATURES} for family in FAMILIES}


def written(table: Table) -> str:
    """As markdown; a column of a feature is named by its title."""
    titles = [title for title, _ in FEATURES.values()]
    lines = [f"| family | in the test | {' | '.join(titles)} |", "|---" * (len(titles) + 2) + "|"]
    for family, cells in table.items():
        lines.append(f"| {TITLES[family]} | `{family}` | {' | '.join(cells[feature] for feature in FEATURES)} |")
    return "\n".join(lines)


def committed(page: str) -> Table:
    """What the page says."""
    inside = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in inside]
    titles = {title: feature for feature, (title, _) in FEATURES.items()}
    return {
        row[1].strip("`"): {titles.get(title, title): cell for title, cell in zip(rows[0][2:], row[2:], strict=True)}
        for row in rows[2:]
    }


def main() -> None:
    start, page = time.perf_counter(), PAGE.read_text()
    with tempfile.TemporaryDirectory() as root:
        table = measured(Path(root))
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{written(table)}\n{END}{rest.partition(END)[2]}")
    cells = [cell for row in table.values() for cell in row.values()]
    counts = f"{cells.count(WORKS)} work, {sum(cell.startswith(REFUSED) for cell in cells)} are refused"
    print(f"{PAGE.relative_to(HERE.parents[1])}: {len(cells)} cells, {counts}; {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    main()
