"""Families that play something through, step by step."""

from __future__ import annotations

from benchmarks.results.programs.problem import NAMES, WORDS, Draw, Problem, family, made


@family
def walks(draw: Draw) -> Problem:
    up, down, left, right = draw.one("UDLR", "NSWE", "^v<>", "udlr")
    size = draw.randint(2, 4)
    wall, test = draw.one(
        ("", "True"),
        (
            f" A step that would lead to a coordinate above {size} or below -{size} is not made.",
            f"max(abs(a), abs(b)) <= {size}",
        ),
        (" A step that would lead to a negative coordinate is not made.", "min(a, b) >= 0"),
    )
    what, result, gives = draw.one(
        ("the last position as a tuple (x, y)", "(x, y)", "tuple[int, int]"),
        ("how many different positions were visited, the start included", "len(seen)", "int"),
        ("the largest value of |x| + |y| on the way", "max(abs(a) + abs(b) for a, b in seen)", "int"),
        ("whether some position was visited again after it had been left", "again", "bool"),
    )
    return made(
        draw.one("walk_grid", "follow_moves", "robot_path"),
        {"moves": "str"},
        gives,
        "A robot starts at (0, 0). '$up' adds 1 to y, '$down' subtracts 1 from y, '$right' adds 1 to x, '$left' "
        "subtracts 1 from x.$wall Return $what.",
        """
        steps = {'$up': (0, 1), '$down': (0, -1), '$right': (1, 0), '$left': (-1, 0)}
        x, y, again = 0, 0, False
        seen = {(0, 0)}
        for move in moves:
            a, b = x + steps[move][0], y + steps[move][1]
            if $test:
                x, y = a, b
                again = again or (x, y) in seen
                seen.add((x, y))
        return $result
        """,
        draw.some(lambda: (draw.letters(up + down + left + right + up + right, 3, 12),)),
        [("",)],
        values=locals(),
    )


@family
def counters(draw: Draw) -> Problem:
    number = draw.randint(2, 4)
    what, result, gives = draw.one(
        (
            "the time at which all customers are done, without a pause after it (0 without customers)",
            "max(free)",
            "int",
        ),
        ("the list of waiting times of the customers", "waits", "list[int]"),
        ("how many customers do not have to wait", "waits.count(0)", "int"),
        ("for each counter, how many customers it served", "served", "list[int]"),
        ("the longest waiting time (0 without customers)", "max(waits, default=0)", "int"),
    )
    pause = draw.one(0, 1, 2)
    rest = " After each customer a counter needs a pause of $pause before it takes the next one." if pause else ""
    done = result if not pause else result.replace("max(free)", f"max(0, max(free) - {pause})")
    return made(
        draw.one("serve_customers", "queue_at_counters", "shop_queue"),
        {"times": "list[int]"},
        gives,
        "Customers wait in one queue for $number counters, all there at time 0; times says how long each of them "
        "takes. "
        "The next customer goes to the counter that is free first, of equal ones to the one with the lower "
        "number.$rest "
        "Return $what.",
        """
        free, waits, served = [0] * $number, [], [0] * $number
        for time in times:
            counter = free.index(min(free))
            waits.append(free[counter])
            free[counter] += time + $pause
            served[counter] += 1
        return $done
        """,
        draw.some(lambda: (draw.numbers(1, 9, 3, 9),)),
        [([],), ([4],)],
        values=locals(),
    )


@family
def elevator(draw: Draw) -> Problem:
    up, down, stop = draw.sample((2, 3, 4, 5, 6), 3)
    start = draw.randint(0, 3)
    what, result, gives = draw.one(
        ("the time that all this takes", "time", "int"),
        ("the floor with the longest ride to it (of equal ones the first), or -1 if nobody calls", "worst[1]", "int"),
        ("the times at which the door opens at each call", "opened", "list[int]"),
        ("how many floors it travels upwards", "upwards", "int"),
    )
    return made(
        draw.one("ride_elevator", "elevator_time", "visit_floors"),
        {"calls": "list[int]"},
        gives,
        "An elevator stands at floor $start and visits the called floors in the given order. It needs $up seconds for "
        "a floor upwards, $down seconds for a floor downwards, and stays $stop seconds at each called floor, beginning "
        "when the door opens on arrival. Return $what.",
        """
        floor, time, upwards, opened, worst = $start, 0, 0, [], (-1, -1)
        for call in calls:
            ride = $up * (call - floor) if call > floor else $down * (floor - call)
            upwards += max(0, call - floor)
            opened.append(time + ride)
            time += ride + $stop
            if ride > worst[0]:
                worst = (ride, call)
            floor = call
        return $result
        """,
        draw.some(lambda: (draw.numbers(0, 9, 2, 6),)),
        [([],)],
        values=locals(),
    )


@family
def lamps(draw: Draw) -> Problem:
    start, sign = draw.one(("off", "False"), ("on", "True"))
    rule, code = draw.one(
        ("every lamp whose number is a multiple of k is switched", "number % k == 0"),
        ("every lamp whose number is at least k is switched", "number >= k"),
        ("the lamps with the numbers k - 1, k and k + 1 are switched, as far as they exist", "abs(number - k) <= 1"),
        ("every lamp is switched but the one with the number k", "number != k"),
    )
    what, result, gives = draw.one(
        ("the numbers of the lamps that are on", "[i + 1 for i, on in enumerate(lamps) if on]", "list[int]"),
        ("how many lamps are off", "lamps.count(False)", "int"),
        (
            "a text with '1' for each lamp that is on and '0' for each one that is off",
            "''.join('1' if on else '0' for on in lamps)",
            "str",
        ),
        (
            "the length of the longest row of neighbouring lamps that are on",
            "max(map(len, ''.join('1' if on else '0' for on in lamps).split('0')))",
            "int",
        ),
    )
    return made(
        draw.one("switch_lamps", "toggle_lights", "press_buttons"),
        {"count": "int", "presses": "list[int]"},
        gives,
        "There are lamps with the numbers 1 to count, all of them $start. For each k in presses, one after the other, "
        "$rule: on becomes off and off becomes on. Return $what.",
        """
        lamps = [$sign] * count
        for k in presses:
            for number in range(1, count + 1):
                if $code:
                    lamps[number - 1] = not lamps[number - 1]
        return $result
        """,
        draw.some(lambda: (draw.randint(3, 9), draw.numbers(1, 6, 1, 4))),
        [(4, [])],
        values=locals(),
    )


@family
def tank(draw: Draw) -> Problem:
    capacity, leak = draw.one(20, 30, 50), draw.randint(1, 4)
    start = draw.randint(0, 10)
    what, result, gives = draw.one(
        ("the level after each hour", "levels", "list[int]"),
        ("how much water was lost by overflowing", "lost", "int"),
        ("how many hours end with an empty tank", "levels.count(0)", "int"),
        (
            "the first hour (counted from 1) that ends with more than half of the capacity, or -1",
            "next((i for i, n in enumerate(levels, 1) if 2 * n > $capacity), -1)",
            "int",
        ),
    )
    order, code = draw.one(
        (
            "first the inflow is added, where everything above the capacity overflows, then",
            "level += flow\n    lost += max(0, level - $capacity)\n    level = max(0, min(level, $capacity) - $leak)",
        ),
        (
            "first (before the inflow)",
            "level = max(0, level - $leak) + flow\n    lost += max(0, level - $capacity)\n    level = min(level, "
            "$capacity)",
        ),
    )
    tail = "" if order.endswith("then") else "; then the inflow is added, where everything above the capacity overflows"
    return made(
        draw.one("fill_tank", "water_levels", "run_tank"),
        {"inflow": "list[int]"},
        gives,
        "A tank with a capacity of $capacity has a level of $start. In each hour, $order the tank loses $leak, but the "
        "level never falls below 0$tail. inflow has the amount that is added in each hour. Return $what.",
        "level, lost, levels = $start, 0, []\nfor flow in inflow:\n    "
        + code
        + "\n    levels.append(level)\nreturn $result",
        draw.some(lambda: (draw.numbers(0, 22, 3, 7),)),
        [([],), ([0] * 12,), ([60],)],
        values=locals(),
    )


@family
def card_rounds(draw: Draw) -> Problem:
    win = draw.randint(2, 3)
    wins, test = draw.one(("higher", "a > b"), ("lower", "a < b"))
    tie, code = draw.one(
        ("nobody gets a point", "pass"),
        ("both get a point", "left += 1\n        right += 1"),
        ("the points of the next round that is no tie are doubled (ties in a row do not add up)", "double = 2"),
    )
    what, result, gives = draw.one(
        ("the points as a tuple (first, second)", "(left, right)", "tuple[int, int]"),
        (
            "'first', 'second' or 'draw', depending on who has more points",
            "'first' if left > right else 'second' if right > left else 'draw'",
            "str",
        ),
        ("the difference of the points", "abs(left - right)", "int"),
    )
    return made(
        draw.one("play_cards", "card_duel", "compare_cards"),
        {"first": "list[int]", "second": "list[int]"},
        gives,
        "Two players lay down their cards one by one; the lists have the same length. The $wins card wins the round "
        "and its player gets $win points; if both are "
        "equal, $tie. Return $what.",
        "left, right, double = 0, 0, 1\nfor a, b in zip(first, second):\n    if a == b:\n        "
        + code
        + "\n    elif $test:\n        left += $win * double\n        double = 1\n    else:\n        right += $win * "
        "double\n        double = 1\nreturn $result",
        draw.some(
            lambda: (
                (size := draw.randint(3, 6)) and [draw.randint(1, 5) for _ in range(size)],
                [draw.randint(1, 5) for _ in range(size)],
            )
        ),
        [([], []), ([3], [3])],
        values=locals(),
    )


@family
def cells(draw: Draw) -> Problem:
    live, dead = draw.one("#.", "X-", "10", "o_")
    rule, test = draw.one(
        ("exactly one of its two neighbours is '$live'", "left != right"),
        ("its two neighbours are equal", "left == right"),
        ("at least one of its neighbours is '$live'", "left or right"),
        ("it is '$dead' and its left neighbour is '$live'", "left and not own"),
        ("it is '$live' and at least one of its neighbours is '$dead'", "own and not (left and right)"),
    )
    edge, code = draw.one(
        ("Cells beyond the ends count as '$dead'.", "False"),
        ("Cells beyond the ends count as '$live'.", "True"),
        ("The row is a ring: the first and the last cell are neighbours.", "ring"),
    )
    left = "cells[i - 1]" if code == "ring" else f"cells[i - 1] if i else {code}"
    right = "cells[(i + 1) % len(cells)]" if code == "ring" else f"cells[i + 1] if i + 1 < len(cells) else {code}"
    what, result, gives = draw.one(
        ("the row after all generations", "''.join('$live' if c else '$dead' for c in cells)", "str"),
        ("how many cells are '$live' after all generations", "sum(cells)", "int"),
    )
    return made(
        draw.one("evolve_row", "next_generations", "cell_row"),
        {"row": "str", "generations": "int"},
        gives,
        "A row has cells that are '$live' or '$dead'. In the next generation a cell is '$live' if, in the present one, "
        "$rule; otherwise it is '$dead'. $edge Return $what.",
        """
        cells = [c == '$live' for c in row]
        for _ in range(generations):
            following = []
            for i, own in enumerate(cells):
                left = $left
                right = $right
                following.append($test)
            cells = following
        return $result
        """,
        draw.some(lambda: (draw.letters(live + dead, 3, 9), draw.randint(1, 4))),
        [("", 2), (live + dead, 0)],
        values=locals(),
    )


@family
def remembered(draw: Draw) -> Problem:
    policy, code = draw.one(
        ("that was used least recently (looked up or added)", "shelf.remove(item)\n        shelf.append(item)"),
        ("that was added first", "pass"),
    )
    size = draw.randint(2, 4)
    what, result, gives = draw.one(
        ("how many look-ups find their item on the shelf", "hits", "int"),
        ("the items on the shelf at the end, alphabetically", "sorted(shelf)", "list[str]"),
        ("the items that were removed, in order", "removed", "list[str]"),
        (
            "the share of look-ups that find their item on the shelf in percent, rounded down (0 without look-ups)",
            "100 * hits // len(items) if items else 0",
            "int",
        ),
    )
    return made(
        draw.one("simulate_shelf", "cache_lookups", "small_memory"),
        {"items": "list[str]"},
        gives,
        "A shelf has room for $size items and is empty at first. The items are looked up one after the other. An "
        "item that "
        "is not on the shelf is added to it; if the shelf is full, the item $policy is removed first. Return $what.",
        """
        shelf, hits, removed = [], 0, []
        for item in items:
            if item in shelf:
                hits += 1
                """
        + code.replace("\n        ", "\n                ")
        + """
            else:
                if len(shelf) == $size:
                    removed.append(shelf.pop(0))
                shelf.append(item)
        return $result
        """,
        draw.some(lambda: ([draw.one(*"abcde") for _ in range(draw.randint(5, 12))],)),
        [([],)],
        values=locals(),
    )


@family
def counting_out(draw: Draw) -> Problem:
    step = draw.randint(2, 5)
    where, code = draw.one(("the one after the removed one", "place"), ("the first one that is left", "0"))
    what, result, gives = draw.one(
        ("the name that remains, or '' if there was none", "circle[0] if circle else ''", "str"),
        ("the names in the order in which they leave, the remaining one last", "gone + circle", "list[str]"),
        (
            "the last two names to remain, in the order of the given list (or fewer)",
            "[n for n in names if n in (gone + circle)[-2:]]",
            "list[str]",
        ),
    )
    return made(
        draw.one("count_out", "last_in_circle", "leave_circle"),
        {"names": "list[str]"},
        gives,
        "Different names stand in a circle. Counting begins at the first name with 1 and goes around; the name "
        "that gets "
        "$step leaves the circle, and counting begins again with 1 at $where. This goes on until one name is left. "
        "Return $what.",
        """
        circle, gone, place = list(names), [], 0
        while len(circle) > 1:
            place = (place + $step - 1) % len(circle)
            gone.append(circle.pop(place))
            place = $code
        return $result
        """,
        draw.some(lambda: (draw.sample(NAMES + WORDS[-6:], draw.randint(2, 8)),)),
        [([],), (["ada"],)],
        values=locals(),
    )


@family
def bouncing(draw: Draw) -> Problem:
    speed, start = draw.randint(2, 3), draw.randint(0, 3)
    what, result, gives = draw.one(
        ("its position after the given number of steps", "place", "int"),
        ("how often it has turned around", "turns", "int"),
        ("the list of its positions after each step", "places", "list[int]"),
        ("how often it was at the last field after a step", "places.count(length - 1)", "int"),
    )
    return made(
        draw.one("bounce", "patrol_track", "move_back_and_forth"),
        {"length": "int", "steps": "int"},
        gives,
        "A track has fields with the numbers 0 to length - 1 (length is at least 4). A token stands on field $start "
        "and moves to higher numbers. "
        "In each step it moves $speed fields in its direction; if it would leave the track, it stops at the last "
        "field in this direction "
        "instead and turns around. Return $what.",
        """
        place, direction, turns, places = $start, 1, 0, []
        for _ in range(steps):
            place += $speed * direction
            if place < 0 or place > length - 1:
                place = max(0, min(place, length - 1))
                direction = -direction
                turns += 1
            places.append(place)
        return $result
        """,
        draw.some(lambda: (draw.randint(4, 8), draw.randint(2, 14))),
        [(4, 0)],
        values=locals(),
    )
