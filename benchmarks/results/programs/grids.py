"""Families about grids of numbers, given as lists of rows."""

from __future__ import annotations

from benchmarks.results.programs.problem import Draw, Problem, family, made

GRID = {"grid": "list[list[int]]"}


@family
def lines_of_grid(draw: Draw) -> Problem:
    lines, code = draw.one(("rows", "grid"), ("columns", "[list(column) for column in zip(*grid)]"))
    value, key = draw.one(
        ("the sum of its numbers", "sum(line)"),
        ("its largest number", "max(line)"),
        ("its number of even numbers", "sum(n % 2 == 0 for n in line)"),
        ("the difference of its largest and smallest number", "max(line) - min(line)"),
        ("its first number minus its last one", "line[0] - line[-1]"),
    )
    what, result, gives = draw.one(
        ("the values of all $lines", "values", "list[int]"),
        (
            "the number (counted from 0) of the one with the largest value, of equal ones the first",
            "values.index(max(values))",
            "int",
        ),
        (
            "how many of the $lines have a value above the value of the first one",
            "sum(value > values[0] for value in values)",
            "int",
        ),
        (
            "the $lines as lists, sorted by value in ascending order; equal ones keep their order",
            "sorted(lines, key=lambda line: $key)",
            "list[list[int]]",
        ),
    )
    return made(
        f"value_of_{lines}",
        GRID,
        gives,
        "For the $lines of a grid that is not empty, the value of each is $value. Return $what.",
        "lines = $code\nvalues = [$key for line in lines]\nreturn $result",
        draw.some(lambda: (draw.grid(0, 12),)),
        [([[3]],)],
        values=locals(),
    )


@family
def selected_cells(draw: Draw) -> Problem:
    step = draw.randint(2, 3)
    which, test = draw.one(
        ("on the border", "i in (0, len(grid) - 1) or j in (0, len(grid[0]) - 1)"),
        ("whose row and column numbers have an even sum (like one colour of a chess board)", "(i + j) % 2 == 0"),
        ("on or above the diagonal, that is, whose column number is not smaller than the row number", "j >= i"),
        ("whose column number is a multiple of $step", "j % $step == 0"),
        ("whose row number equals the value in the cell", "i == n"),
        ("not on the border", "0 < i < len(grid) - 1 and 0 < j < len(grid[0]) - 1"),
    )
    what, result, gives = draw.one(
        ("the sum of their values", "sum(found)", "int"),
        ("the list of their values, row by row", "found", "list[int]"),
        ("the largest of their values, or -1 if there is no such cell", "max(found, default=-1)", "int"),
        ("how many of them have an odd value", "sum(n % 2 for n in found)", "int"),
    )
    return made(
        draw.one("selected_cells_of", "pick_cells", "cell_selection"),
        GRID,
        gives,
        "Rows and columns of the grid are numbered from 0. Consider the cells $which. Return $what. Values are not "
        "negative.",
        "found = [n for i, row in enumerate(grid) for j, n in enumerate(row) if $test]\nreturn $result",
        draw.some(lambda: (draw.grid(0, 9),)),
        [([[3]],), ([[1, 2, 3], [4, 5, 6], [7, 8, 9]],)],
        values=locals(),
    )


@family
def moved_grid(draw: Draw) -> Problem:
    moves = {
        "mirror it left to right": "grid = [row[::-1] for row in grid]",
        "mirror it top to bottom": "grid = grid[::-1]",
        "turn it by 90 degrees clockwise": "grid = [list(column) for column in zip(*grid[::-1])]",
        "exchange rows and columns": "grid = [list(column) for column in zip(*grid)]",
        "move every row one place down, the last one to the top": "grid = grid[-1:] + grid[:-1]",
        "move every column one place to the left, the first one to the "
        "right end": "grid = [row[1:] + row[:1] for row in grid]",
        "remove its first row": "grid = grid[1:]",
    }
    first, second = draw.sample(sorted(moves), 2)
    one, two = moves[first], moves[second]
    return made(
        draw.one("move_grid", "transform_grid", "rearrange_grid"),
        GRID,
        "list[list[int]]",
        "Take the grid, which has at least two rows and two columns, and do two things one after the other: first "
        "$first, then $second. Return the new grid.",
        "$one\n$two\nreturn grid",
        draw.some(lambda: (draw.grid(0, 9),)),
        values=locals(),
    )


@family
def neighbour_cells(draw: Draw) -> Problem:
    around, test = draw.one(
        ("up, down, left and right", "abs(di) + abs(dj) == 1"), ("in all eight directions", "(di, dj) != (0, 0)")
    )
    rule, value = draw.one(
        ("larger than all of its neighbours", "all(n > m for m in near)"),
        ("smaller than all of its neighbours", "all(n < m for m in near)"),
        ("equal to that of at least one neighbour", "any(n == m for m in near)"),
        ("larger than the sum of its neighbours", "n > sum(near)"),
        ("larger than at least half of its neighbours", "2 * sum(n > m for m in near) >= len(near)"),
    )
    what, result, gives = draw.one(
        ("how many such cells there are", "len(found)", "int"),
        ("the positions of such cells as tuples (row, column), row by row", "found", "list[tuple[int, int]]"),
        ("the sum of the values of such cells", "sum(grid[i][j] for i, j in found)", "int"),
    )
    return made(
        draw.one("compare_neighbours", "special_cells", "cells_and_neighbours"),
        GRID,
        gives,
        "The neighbours of a cell are the cells next to it $around, as far as they are in the grid. Consider the cells "
        "whose value is $rule. Return $what. The grid has at least two rows and two columns, numbered from 0.",
        """
        found = []
        for i, row in enumerate(grid):
            for j, n in enumerate(row):
                near = [
                    grid[i + di][j + dj]
                    for di in (-1, 0, 1)
                    for dj in (-1, 0, 1)
                    if $test and 0 <= i + di < len(grid) and 0 <= j + dj < len(row)
                ]
                if $value:
                    found.append((i, j))
        return $result
        """,
        draw.some(lambda: (draw.grid(0, 7),)),
        values=locals(),
    )


@family
def reading_orders(draw: Draw) -> Problem:
    order, code = draw.one(
        (
            "row by row, the first row from left to right, the second from right to left, and so on in turn",
            "[n for i, row in enumerate(grid) for n in (row if i % 2 == 0 else row[::-1])]",
        ),
        (
            "column by column from left to right, each from bottom to top",
            "[n for column in zip(*grid) for n in column[::-1]]",
        ),
        (
            "row by row from the last row to the first, each from left to right",
            "[n for row in grid[::-1] for n in row]",
        ),
        (
            "column by column, the first from top to bottom, the second from bottom to top, and so on in turn",
            "[n for j, column in enumerate(zip(*grid)) for n in (column if j % 2 == 0 else column[::-1])]",
        ),
        (
            "along the diagonals that go down to the left, beginning in the corner at the top left, each from top "
            "to bottom",
            "[grid[i][s - i] for s in range(len(grid) + len(grid[0]) - 1) for i in range(len(grid)) if 0 <= s - i < "
            "len(grid[0])]",
        ),
    )
    number = draw.randint(2, 4)
    what, result, gives = draw.one(
        ("the list of all numbers in this order", "found", "list[int]"),
        ("every ${number}${th} number in this order", "found[$number - 1::$number]", "list[int]"),
        (
            "the differences of each number to the one before it in this order",
            "[b - a for a, b in zip(found, found[1:])]",
            "list[int]",
        ),
        (
            "the place (counted from 0) of the largest number in this order, of equal ones the first",
            "found.index(max(found))",
            "int",
        ),
    )
    th = {2: "nd", 3: "rd", 4: "th"}[number]
    return made(
        draw.one("read_grid", "grid_to_list", "walk_over_grid"),
        GRID,
        gives,
        "Read the numbers of a grid that is not empty $order. Return $what.",
        "found = $code\nreturn $result",
        draw.some(lambda: (draw.grid(0, 20),)),
        [([[4]],)],
        values=locals(),
    )
