"""Families about dictionaries and records."""

from __future__ import annotations

from benchmarks.results.programs.problem import GOODS, NAMES, WORDS, Draw, Problem, family, made


@family
def weighted_votes(draw: Draw) -> Problem:
    first, later = draw.one((3, 1), (5, 2), (2, 1), (4, 3))
    what, result, gives = draw.one(
        (
            "the name with the most points, of equal ones the alphabetically first",
            "min(points, key=lambda n: (-points[n], n)) if points else ''",
            "str",
        ),
        (
            "all names sorted by points, highest first, equal ones alphabetically",
            "sorted(points, key=lambda n: (-points[n], n))",
            "list[str]",
        ),
        ("a dictionary with the points of every name that occurs", "points", "dict[str, int]"),
        (
            "the names with at least $least points, alphabetically",
            "sorted(n for n in points if points[n] >= $least)",
            "list[str]",
        ),
    )
    least = draw.randint(3, 6)
    empty = " If there are no ballots, return ''." if gives == "str" else ""
    return made(
        draw.one("count_ballots", "run_election", "tally_points"),
        {"ballots": "list[list[str]]"},
        gives,
        "Each ballot is a list of different names. The first name of a ballot gets $first points, every other name on "
        "it gets $later. Return $what.$empty",
        """
        points = {}
        for ballot in ballots:
            for place, name in enumerate(ballot):
                points[name] = points.get(name, 0) + ($first if place == 0 else $later)
        return $result
        """,
        draw.some(lambda: ([draw.sample(NAMES[:5], draw.randint(1, 3)) for _ in range(draw.randint(2, 5))],)),
        [([],)],
        values=locals(),
    )


@family
def stock_changes(draw: Draw) -> Problem:
    low = draw.randint(2, 6)
    below, code = draw.one(
        ("it becomes 0", "stock[item] = max(0, stock.get(item, 0) + change)"),
        (
            "the change is ignored",
            "if stock.get(item, 0) + change >= 0:\n        stock[item] = stock.get(item, 0) + change",
        ),
    )
    what, result, gives = draw.one(
        (
            "the stock as a dictionary without items of which there are 0",
            "{item: n for item, n in stock.items() if n}",
            "dict[str, int]",
        ),
        (
            "the items of which there are fewer than $low, alphabetically",
            "sorted(item for item, n in stock.items() if n < $low)",
            "list[str]",
        ),
        ("how many things there are of all items together", "sum(stock.values())", "int"),
        (
            "the item of which there is most, of equal ones the alphabetically first",
            "min(stock, key=lambda item: (-stock[item], item))",
            "str",
        ),
    )
    return made(
        draw.one("update_stock", "apply_changes", "keep_stock"),
        {"stock": "dict[str, int]", "changes": "list[tuple[str, int]]"},
        gives,
        "Apply the changes to the stock one after the other. Each is an item and the number by which its stock "
        "changes; an item that is not in the stock yet has 0. If a change would make a number negative, $below. "
        "Return $what. The stock is not empty at the beginning.",
        "stock = dict(stock)\nfor item, change in changes:\n    " + code + "\nreturn $result",
        draw.some(
            lambda: (
                draw.table(GOODS[:5], 0, 9),
                [(draw.one(*GOODS[:6]), draw.one(-7, -4, -2, 1, 3, 6)) for _ in range(draw.randint(2, 6))],
            )
        ),
        [({"eggs": 3}, []), ({"eggs": 3}, [("eggs", -3), ("eggs", -1)])],
        values=locals(),
    )


@family
def grouped_words(draw: Draw) -> Problem:
    key, code = draw.one(
        ("first letter", "word[0]"),
        ("last letter", "word[-1]"),
        ("number of letters", "len(word)"),
        ("number of vowels (a, e, i, o, u)", "sum(c in 'aeiou' for c in word)"),
    )
    what, value, kind = draw.one(
        ("the list of its words in alphabetical order", "sorted(group)", "list[str]"),
        ("how many words it has", "len(group)", "int"),
        ("its longest word, of equal ones the first", "max(group, key=len)", "str"),
        ("its last word in the given order", "group[-1]", "str"),
        ("its words joined with '+' in the given order", "'+'.join(group)", "str"),
    )
    least = draw.one(1, 2)
    only = f" Groups of fewer than {least} words are left out." if least > 1 else ""
    gives = f"dict[{'str' if 'word[' in code else 'int'}, {kind}]"
    return made(
        draw.one("group_words", "words_by_feature", "index_words"),
        {"words": "list[str]"},
        gives,
        "Group the words by their $key. Return a dictionary that has for each group: $what.$only Words are not empty.",
        """
        groups = {}
        for word in words:
            groups.setdefault($code, []).append(word)
        return {key: $value for key, group in groups.items() if len(group) >= $least}
        """,
        draw.some(lambda: (draw.words(4, 8),)),
        [([],)],
        values=locals(),
    )


@family
def inverted(draw: Draw) -> Problem:
    what, value, kind = draw.one(
        ("the list of its keys in alphabetical order", "sorted(names)", "list[str]"),
        ("the number of its keys", "len(names)", "int"),
        ("the alphabetically last of its keys", "max(names)", "str"),
        ("its shortest key, of equal ones the alphabetically first", "min(names, key=lambda n: (len(n), n))", "str"),
    )
    number = draw.randint(2, 4)
    which, test = draw.one(
        ("", "True"),
        (" Values that only one key has are left out.", "len(names) > 1"),
        (" Odd values are left out.", "value % 2 == 0"),
        (" Values below $number are left out.", "value >= $number"),
        (" Values that more than two keys have are left out.", "len(names) <= 2"),
    )
    return made(
        draw.one("turn_around", "keys_by_value", "flip_dictionary"),
        {"table": "dict[str, int]"},
        f"dict[int, {kind}]",
        "Return a dictionary from each value of the table to $what.$which",
        """
        found = {}
        for name, value in table.items():
            found.setdefault(value, []).append(name)
        return {value: $value for value, names in found.items() if $test}
        """,
        draw.some(lambda: (draw.table(WORDS[:9], 1, 5, 3, 8),)),
        [({},)],
        values=locals(),
    )


@family
def joined_tables(draw: Draw) -> Problem:
    both, value = draw.one(
        ("the sum of its values", "left[key] + right[key]"),
        ("the larger value", "max(left[key], right[key])"),
        ("the value in left minus the value in right", "left[key] - right[key]"),
        ("the value in right", "right[key]"),
        ("the distance of its values", "abs(left[key] - right[key])"),
    )
    single, code = draw.one(
        ("gets the value that it has", "found[key] = left.get(key, right.get(key))"),
        ("is left out", "pass"),
        ("gets the value that it has with the other sign", "found[key] = -left.get(key, right.get(key))"),
        (
            "gets its value if it is in left and is left out otherwise",
            "found.update({key: left[key]} if key in left else {})",
        ),
    )
    drop, last = draw.one(
        ("", "found"), (" Keys whose new value is 0 are left out.", "{key: n for key, n in found.items() if n != 0}")
    )
    return made(
        draw.one("merge_tables", "join_tables", "unite_counts"),
        {"left": "dict[str, int]", "right": "dict[str, int]"},
        "dict[str, int]",
        "Join two tables. A key that is in both gets $both; a key that is in one of them only $single.$drop",
        """
        found = {}
        for key in [*left, *right]:
            if key in left and key in right:
                found[key] = $value
            else:
                $code
        return $last
        """,
        draw.some(lambda: (draw.table(GOODS[:6], 0, 5, 2, 4), draw.table(GOODS[:6], 0, 5, 2, 4))),
        [({}, {}), ({"hats": 0}, {})],
        values=locals(),
    )


@family
def best_keys(draw: Draw) -> Problem:
    count, limit = draw.randint(2, 4), draw.randint(3, 8)
    most, sign = draw.one(("largest", "-"), ("smallest", ""))
    tie, second = draw.one(
        ("alphabetically", "name"),
        ("shorter names first, then alphabetically", "len(name), name"),
        ("by their last letter, then alphabetically", "name[-1], name"),
    )
    which, test = draw.one(
        ("all names", "True"),
        ("the names with a value of at least $limit", "table[name] >= $limit"),
        ("the names with an even value", "table[name] % 2 == 0"),
    )
    return made(
        draw.one("best_names", "leading_names", "name_ranking"),
        {"table": "dict[str, int]"},
        "list[str]",
        "Among $which, return the $count with the $most values, in this order; names with equal values come $tie. If "
        "there are fewer such names, return all of them.",
        """
        names = [name for name in table if $test]
        return sorted(names, key=lambda name: (${sign}table[name], $second))[:$count]
        """,
        draw.some(lambda: (draw.table(WORDS[10:34], 0, 9, 3, 7),)),
        [({},)],
        values=locals(),
    )


@family
def customer_totals(draw: Draw) -> Problem:
    limit, percent = draw.one(50, 80, 100, 120), draw.one(10, 20, 50)
    what, code = draw.one(
        (
            "a total of more than $limit is reduced by $percent percent, rounded down",
            "total * (100 - $percent) // 100 if total > $limit else total",
        ),
        ("a total of at most $limit is increased by 5", "total + 5 if total <= $limit else total"),
        ("a total of more than $limit becomes $limit", "min(total, $limit)"),
    )
    wanted, result, gives = draw.one(
        ("a dictionary from customers to their totals", "totals", "dict[str, int]"),
        ("the sum of all totals", "sum(totals.values())", "int"),
        (
            "the customers with the largest total, alphabetically",
            "sorted(c for c in totals if totals[c] == max(totals.values()))",
            "list[str]",
        ),
    )
    return made(
        draw.one("bill_customers", "order_totals", "sum_orders"),
        {"orders": "list[tuple[str, int]]"},
        gives,
        "Each order has a customer and an amount. Add up the amounts of each customer; then $what. Return $wanted.",
        """
        totals = {}
        for customer, amount in orders:
            totals[customer] = totals.get(customer, 0) + amount
        totals = {customer: $code for customer, total in totals.items()}
        return $result
        """,
        draw.some(lambda: ([(draw.one(*NAMES[:4]), draw.randint(5, 90)) for _ in range(draw.randint(3, 7))],)),
        [([],)],
        values=locals(),
    )


@family
def mark_books(draw: Draw) -> Problem:
    limit = draw.randint(4, 7)
    drop, code = draw.one(
        ("the lowest mark is dropped", "sorted(marks)[1:]"),
        ("the highest mark is dropped", "sorted(marks)[:-1]"),
        ("the lowest and the highest mark are dropped", "sorted(marks)[1:-1]"),
        ("the first mark is dropped", "marks[1:]"),
        ("marks below 2 are dropped", "[m for m in marks if m >= 2]"),
    )
    few = draw.one(2, 3)
    what, result, gives = draw.one(
        ("a dictionary from names to averages", "averages", "dict[str, int]"),
        (
            "the names with an average of at least $limit, alphabetically",
            "sorted(n for n in averages if averages[n] >= $limit)",
            "list[str]",
        ),
        (
            "the difference of the highest and the lowest average",
            "max(averages.values()) - min(averages.values()) if averages else 0",
            "int",
        ),
    )
    empty = ", 0 if there is none" if gives == "int" else ""
    return made(
        draw.one("average_marks", "final_marks", "evaluate_marks"),
        {"book": "dict[str, list[int]]"},
        gives,
        "The book has a list of marks for each name. If somebody has more than $few marks, $drop; otherwise all "
        "count. An average is the sum of the marks that count divided by their number, rounded down; it is 0 if no "
        "mark counts. Return $what$empty.",
        """
        averages = {}
        for name, marks in book.items():
            kept = $code if len(marks) > $few else marks
            averages[name] = sum(kept) // len(kept) if kept else 0
        return $result
        """,
        draw.some(lambda: ({name: draw.numbers(0, 10, 1, 6) for name in draw.sample(NAMES, draw.randint(2, 4))},)),
        [({},), ({"ada": []},)],
        values=locals(),
    )


@family
def nested_lookup(draw: Draw) -> Problem:
    sign = draw.one(".", "/", ":", ">")
    default = draw.one("None", "-1", "'missing'")
    what, result, gives = draw.one(
        ("the value at the end of the path", "tree", "object"),
        ("how many steps of the path could be made", "steps", "int"),
        (
            "the keys of the dictionary at the end of the path, sorted, and [] if the end is no dictionary",
            "sorted(tree) if isinstance(tree, dict) else []",
            "list[str]",
        ),
    )
    missing = "steps" if gives == "int" else default
    absent = "" if gives == "int" else f" If a part is not there, return {default}."
    deep = {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": {"a": {"b": 4}, "c": 5}, "b": 6}
    return made(
        draw.one("follow_path", "look_up_path", "walk_keys"),
        {"tree": "dict", "path": "str"},
        gives,
        "The tree is a dictionary whose values are numbers or dictionaries of the same kind. The path names keys, "
        "separated by '$sign': each part is looked up in what the part before it led to. Return $what.$absent",
        """
        steps = 0
        for part in path.split('$sign'):
            if not isinstance(tree, dict) or part not in tree:
                return $missing
            tree = tree[part]
            steps += 1
        return $result
        """,
        [(deep, sign.join(path)) for path in ("abc", "f", "ae", "fab", "a", "fa", "ab", "b", "fx", "aex", "z", "fc")],
        values=locals(),
    )
