"""Families about intervals, clocks and calendars."""

from __future__ import annotations

from benchmarks.results.programs.problem import Draw, Problem, family, made

SPANS = {"spans": "list[tuple[int, int]]"}
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


def some_spans(draw: Draw, top: int = 30) -> list[tuple[int, int]]:
    return [(low := draw.randint(0, top), low + draw.randint(1, 8)) for _ in range(draw.randint(2, 6))]


@family
def united_spans(draw: Draw) -> Problem:
    gap = draw.randint(0, 4)
    near = (
        "overlap or touch"
        if gap == 0
        else f"overlap or have a gap of at most {gap} between the end of one and the start of the other"
    )
    what, result, gives = draw.one(
        (
            "the resulting spans in ascending order, as a list of tuples",
            "[tuple(span) for span in found]",
            "list[tuple[int, int]]",
        ),
        ("how many spans result", "len(found)", "int"),
        ("the total length of the resulting spans", "sum(high - low for low, high in found)", "int"),
        (
            "the length of the longest resulting span (0 without spans)",
            "max((high - low for low, high in found), default=0)",
            "int",
        ),
        (
            "the gaps between resulting spans that follow each other, as a list of lengths",
            "[b[0] - a[1] for a, b in zip(found, found[1:])]",
            "list[int]",
        ),
    )
    return made(
        draw.one("unite_spans", "join_spans", "combine_spans"),
        SPANS,
        gives,
        "A span has a start and a larger end. Spans that $near are united to one, again and again. Return $what.",
        """
        found = []
        for low, high in sorted(spans):
            if found and low - found[-1][1] <= $gap:
                found[-1][1] = max(found[-1][1], high)
            else:
                found.append([low, high])
        return $result
        """,
        draw.some(lambda: (some_spans(draw),)),
        [([],), ([(2, 5)],)],
        values=locals(),
    )


@family
def free_time(draw: Draw) -> Problem:
    start, end, least = draw.randint(0, 8), draw.randint(25, 36), draw.randint(1, 4)
    what, result, gives = draw.one(
        (
            "the free spans of at least $least hours, in ascending order",
            "[span for span in free if span[1] - span[0] >= $least]",
            "list[tuple[int, int]]",
        ),
        ("how many hours are free", "sum(b - a for a, b in free)", "int"),
        (
            "the longest free span, of equal ones the first, or None",
            "max(free, key=lambda s: s[1] - s[0], default=None)",
            "tuple[int, int]",
        ),
        (
            "the start of the first free span of at least $least hours, or -1",
            "next((a for a, b in free if b - a >= $least), -1)",
            "int",
        ),
    )
    return made(
        draw.one("free_hours", "find_gaps", "open_slots"),
        {"busy": "list[tuple[int, int]]"},
        gives,
        "A schedule goes from hour $start to hour $end. The busy spans (start, end) are in no order, may overlap "
        "and may reach beyond the "
        "schedule. Free spans are the largest spans of the schedule in which nothing is busy. Return $what.",
        """
        free, now = [], $start
        for low, high in sorted(busy):
            if min(low, $end) > now:
                free.append((now, min(low, $end)))
            now = max(now, high)
        if now < $end:
            free.append((now, $end))
        return $result
        """,
        draw.some(lambda: (some_spans(draw, 36),)),
        [([],), ([(0, 50)],)],
        values=locals(),
    )


@family
def covered_points(draw: Draw) -> Problem:
    least = draw.randint(2, 3)
    ends, test = draw.one(
        ("Both ends belong to a span.", "low <= p <= high"),
        ("The start belongs to a span, its end does not.", "low <= p < high"),
        ("Neither of its ends belongs to a span.", "low < p < high"),
    )
    what, result, gives = draw.one(
        ("how many whole numbers belong to at least $least spans", "sum(n >= $least for n in counts.values())", "int"),
        (
            "the largest number of spans that one whole number belongs to (0 without spans)",
            "max(counts.values(), default=0)",
            "int",
        ),
        (
            "the smallest whole number that belongs to the most spans, or -1 if none belongs to any",
            "min((p for p in counts if counts[p] == max(counts.values()) and counts[p]), default=-1)",
            "int",
        ),
        (
            "the whole numbers that belong to exactly $least spans, in ascending order",
            "[p for p in counts if counts[p] == $least]",
            "list[int]",
        ),
    )
    return made(
        draw.one("cover_counts", "points_in_spans", "overlap_facts"),
        SPANS,
        gives,
        "Each span has a start and a larger end, which are not negative. $ends Return $what.",
        """
        top = max((high for _, high in spans), default=-1)
        counts = {p: sum($test for low, high in spans) for p in range(top + 1)}
        return $result
        """,
        draw.some(lambda: (some_spans(draw, 12),)),
        [([],), ([(2, 5)],)],
        values=locals(),
    )


@family
def clipped_spans(draw: Draw) -> Problem:
    low, high = draw.randint(4, 12), draw.randint(18, 28)
    rest, code = draw.one(("are left out", "if b > a"), ("become (0, 0)", "zero"))
    what, result, gives = draw.one(
        ("the spans in their order", "found", "list[tuple[int, int]]"),
        ("the sum of their lengths", "sum(b - a for a, b in found)", "int"),
        ("their lengths in descending order", "sorted((b - a for a, b in found), reverse=True)", "list[int]"),
        ("how many spans were not changed", "sum(span in spans for span in found)", "int"),
    )
    made_by = "[(a, b) for a, b in cut if b > a]" if code != "zero" else "[(a, b) if b > a else (0, 0) for a, b in cut]"
    return made(
        draw.one("clip_spans", "cut_to_window", "limit_spans"),
        SPANS,
        gives,
        "Cut each span (start, end) so that it lies between $low and $high: a start below $low becomes $low, an end "
        "above $high becomes $high. "
        "Spans of which no length is left $rest. Return $what.",
        "cut = [(max(a, $low), min(b, $high)) for a, b in spans]\nfound = $made_by\nreturn $result",
        draw.some(lambda: (some_spans(draw),)),
        [([],), ([(high, high + 3)],)],
        values=locals(),
    )


@family
def clock_times(draw: Draw) -> Problem:
    step = draw.one(7, 15, 25, 40, 90, 135)
    sign = draw.one(":", ".", "h")
    what, result, gives = draw.one(
        ("the time $step minutes later", "show(total + $step)", "str"),
        ("the time $step minutes earlier", "show(total - $step)", "str"),
        ("how many minutes are left until the next midnight", "1440 - total", "int"),
        ("the time rounded down to a multiple of $step minutes after midnight", "show(total // $step * $step)", "str"),
        ("the time that is as long before midnight as this one is after it", "show(-total)", "str"),
        (
            "how many of the four digits of the time $step minutes later differ from those of this one",
            "sum(a != b for a, b in zip(time, show(total + $step)))",
            "int",
        ),
    )
    return made(
        draw.one("shift_time", "clock_answer", "change_time"),
        {"time": "str"},
        gives,
        "A time of day is written with four digits, such as '08${sign}05', from '00${sign}00' to '23${sign}59'; "
        "after '23${sign}59' comes '00${sign}00'. For the given "
        "time return $what.",
        """
        def show(minutes):
            minutes %= 1440
            return f'{minutes // 60:02d}$sign{minutes % 60:02d}'

        total = 60 * int(time[:2]) + int(time[3:])
        return $result
        """,
        draw.some(lambda: (f"{draw.randint(0, 23):02d}{sign}{draw.randint(0, 59):02d}",)),
        [(f"00{sign}00",), (f"23{sign}59",)],
        values=locals(),
    )


@family
def own_calendar(draw: Draw) -> Problem:
    months, days, week = draw.one(10, 12, 13, 8), draw.one(20, 28, 30, 36), draw.one(5, 6, 8, 10)
    what, result, takes, gives = draw.one(
        (
            "the date that is the given number of days (not negative) after the given date, as a tuple (year, "
            "month, day)",
            "(total // $year, total % $year // $days + 1, total % $days + 1)",
            "after",
            "tuple[int, int, int]",
        ),
        ("the day of the week of the given date, as a number from 1 to $week", "total % $week + 1", "", "int"),
        ("how many days of its year are left after the given date", "$year - 1 - total % $year", "", "int"),
        ("the number of days from the first day of the year 0 to the given date", "total", "", "int"),
    )
    year = months * days
    more = " + after" if takes else ""
    kinds = {"year": "int", "month": "int", "day": "int"} | ({"after": "int"} if takes else {})

    def arguments() -> tuple[int, ...]:
        date = draw.randint(0, 9), draw.randint(1, months), draw.randint(1, days)
        return (*date, draw.randint(1, 300)) if takes else date

    weeks = (
        " A week has $week days, and the first day of the year 0 is the first day of a week." if "week" in what else ""
    )
    return made(
        draw.one("calendar_date", "planet_calendar", "date_question"),
        kinds,
        gives,
        "A calendar has $months months of $days days each; months and days are counted from 1, years from 0.$weeks "
        "Return $what.",
        "total = year * $year + (month - 1) * $days + day - 1$more\nreturn $result",
        draw.some(arguments),
        values=locals(),
    )


@family
def weekdays(draw: Draw) -> Problem:
    free = draw.one(("Sat", "Sun"), ("Fri", "Sat"), ("Sun",), ("Wed", "Sun"))
    closed = " and ".join(free)
    days, shown = list(DAYS), ", ".join(DAYS)
    what, result, gives = draw.one(
        ("the day on which the work is done", "days[place]", "str"),
        ("how many days pass until then, the first one not counted", "passed", "int"),
        ("the list of all days from the first to the last one", "seen", "list[str]"),
        ("how many days without work there are on the way", "sum(day in free for day in seen)", "int"),
    )
    return made(
        draw.one("finish_day", "work_days", "plan_work"),
        {"start": "str", "work": "int"},
        gives,
        "The days of the week are $shown. Nobody works on $closed. Work that takes the given number of "
        "days (at least 1) begins on the day start, which counts if it is a day of work, and goes on until it is "
        "done. Return $what.",
        """
        days, free = $days, $free
        place, passed, seen = days.index(start), 0, [start]
        left = work - (start not in free)
        while left:
            place = (place + 1) % 7
            passed += 1
            seen.append(days[place])
            left -= days[place] not in free
        return $result
        """,
        draw.some(lambda: (draw.one(*DAYS), draw.randint(1, 9))),
        values=locals(),
    )
