"""Rules that the key `reward` names: hand-worked verdicts, and what is refused."""

from __future__ import annotations

import json
import time

import pytest
from byte_tokenizer import byte_tokenizer

from paddock.config.schema import REWARD_RULES
from paddock.data.dataset import PromptDataset
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rewards.rules import NAMED, contains, exact_match, json_schema, last_json, prepared, regex
from paddock.rewards.score import Score, ScoreRequest
from paddock.trainer.assembly import open_rewards


def ask(rule, response, truth, **options):
    return rule(response, truth, **options)


def test_every_rule_that_the_config_offers_is_there():
    assert tuple(NAMED) == REWARD_RULES


CASE, POINTS = {"ignore_case": True}, {"ignore_punctuation": True}


@pytest.mark.parametrize(
    ("response", "truth", "options", "score"),
    [
        ("Paris", "Paris", {}, 1),
        ("  Paris\n", "Paris", {}, 1),
        ("New\n  York", "New York", {}, 1),
        ("NewYork", "New York", {}, 0),
        ("paris", "Paris", {}, 0),
        ("Paris.", "Paris", {}, 0),
        ("It is Paris", "Paris", {}, 0),
        ("", "Paris", {}, 0),
        ("", "", {}, 1),
        ("42", 42, {}, 1),
        ("42.0", 42, {}, 0),
        ("UK", ["United Kingdom", "UK"], {}, 1),
        ("U", ["United Kingdom", "UK"], {}, 0),
        ("paris", "Paris", CASE, 1),
        ("STRASSE", "Straße", CASE, 1),
        ("Paris.", "Paris", POINTS, 1),
        ("“Paris”!", "Paris", POINTS, 1),
        ("3.5", "35", POINTS, 1),
        ("paris.", "Paris", POINTS, 0),
        ("paris.", "Paris", CASE | POINTS, 1),
        ("北京。", "北京", POINTS, 1),
    ],
)
def test_exact_match(response, truth, options, score):
    assert ask(exact_match, response, truth, **options) == score


@pytest.mark.parametrize(
    ("response", "truth", "options", "score"),
    [
        ("The capital is Paris.", "Paris", {}, 1),
        ("The capital is paris.", "Paris", {}, 0),
        ("The capital is paris.", "Paris", CASE, 1),
        ("A Parisian one", "Paris", {}, 0),
        ("A Parisian one", "Paris", {"whole_words": False}, 1),
        ("comParis", "Paris", {}, 0),
        ("Parisian, no: Paris", "Paris", {}, 1),
        ("x = 15", "5", {}, 0),
        ("x = 5", "5", {}, 1),
        ("x=5km", "5", {}, 1),
        ("50", "5", {}, 0),
        ("3.5", "5", {}, 1),  # a rule for texts: numbers are `math`'s
        ("New   York city", "New York", {}, 1),
        ("首都是北京市", "北京", {}, 1),
        ("one of two", ["two", "three"], {}, 1),
        ("one", ["two", "three"], {}, 0),
        ("(a)", "(a)", {}, 1),
        ("", "a", {}, 0),
        ("7", 7, {}, 1),
    ],
)
def test_contains(response, truth, options, score):
    assert ask(contains, response, truth, **options) == score


@pytest.mark.parametrize(
    ("response", "truth", "pattern", "score"),
    [
        ("The answer is 42.", r"\b42\b", None, 1),
        ("The answer is 421.", r"\b42\b", None, 0),
        ("b", ["^a$", "^b$"], None, 1),
        ("<think>x</think> 5", "unused", r"^<think>.*</think>", 1),
        ("<think>x\ny</think> 5", "unused", r"^<think>.*</think>", 0),
        ("<think>x\ny</think> 5", "unused", r"(?s)^<think>.*</think>", 1),
        ("Answer: 3.5", "3.5", r"Answer: {ground_truth}$", 1),
        ("Answer: 3x5", "3.5", r"Answer: {ground_truth}$", 0),
        ("Answer: UK", ["United Kingdom", "UK"], r"(?i)answer: {ground_truth}$", 1),
        ("aaa", "unused", "a{3}", 1),
        ("b", "ab", r"^[{ground_truth}]$", 1),
        ("3", "3x", r"^{ground_truth}?$", 1),
    ],
)
def test_regex(response, truth, pattern, score):
    assert prepared("regex", {"pattern": pattern}) == {"pattern": pattern}
    assert ask(regex, response, truth, pattern=pattern) == score


def test_a_pattern_that_backtracks_without_end_is_cut_off_after_half_a_second():
    began = time.process_time()
    found = ask(regex, "a" * 40 + "!", "unused", pattern="^(a+)+$")
    assert found == Score(0.0, timed_out=True) and time.process_time() - began < 5
    assert ask(regex, "aaa", "unused", pattern="^(a+)+$") == 1.0, "and the next is scored as if nothing had been"


@pytest.mark.parametrize(
    ("rule", "truth", "message"),
    [
        (exact_match, {"a": 1}, "not a text or a list of texts"),
        (exact_match, None, "not a text"),
        (exact_match, [], "an empty list"),
        (contains, "", "the ground truth is empty"),
        (regex, "(", "is not a regular expression: missing \\)"),
    ],
)
def test_a_ground_truth_that_cannot_be_used_is_a_mistake_of_the_row(rule, truth, message):
    with pytest.raises(ValueError, match=message):
        ask(rule, "x", truth)


@pytest.mark.parametrize(
    ("text", "opening", "value"),
    [
        ('{"a": 1}', "{", {"a": 1}),
        ('first {"a": 1} then ```json\n{"a": {"b": 2}}\n``` done', "{", {"a": {"b": 2}}),
        ('{"a": 1} and {"a": ', "{", {"a": 1}),
        ('{"a": {"b": 2}', "{", {"b": 2}),
        ("no json {here}", "{", None),
        ('{"a": NaN}', "{", None),
        ('[1] and [2, {"a": 3}]', "[", [2, {"a": 3}]),
        ('[{"a": 1}, {"a": 2}]', "{", {"a": 2}),
        ('{"text": "a } brace {"}', "{", {"text": "a } brace {"}),
        ('{"a":' * 20_000, "{", None),
        ('{"a":1} ' + '{"a":' * 20_000 + "}", "{", {"a": 1}),
    ],
)
def test_the_last_json_of_a_text_is_found(text, opening, value):
    assert last_json(text, opening) == value


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "integer"}}
TREE = {"type": "object", "properties": {"next": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("response", "schema", "score"),
    [
        ('{"name": "Ann", "age": 3}', SCHEMA, 1),
        ('Sure! ```json\n{"name": "Ann", "age": 3}\n```', SCHEMA, 1),
        ('{"name": "Ann", "age": -3}', SCHEMA, 0),
        ('{"name": "Ann", "age": "3"}', SCHEMA, 0),
        ('{"name": "Ann"}', SCHEMA, 0),
        ('{"name": "Ann", "age": 3, "x": 1}', SCHEMA, 0),
        ('{"name": "Ann", "age": 3} {"name": "Bob"}', SCHEMA, 0),
        ("Ann is 3", SCHEMA, 0),
        ("", SCHEMA, 0),
        ("[1, 2]", LIST, 1),
        ('[1, "2"]', LIST, 0),
        ('{"a": [1, 2]}', LIST, 1),
        ('{"next": ' * 600 + "{}" + "}" * 600, TREE, 0),
        ("{}", {}, 1),
    ],
)
def test_json_schema(response, schema, score):
    pytest.importorskip("jsonschema")
    assert ask(json_schema, response, json.dumps(schema)) == score, "the row's, as a text"
    assert ask(json_schema, response, schema) == score, "as an object"
    assert ask(json_schema, response, "unused", schema=schema) == score, "and the config's"


def test_what_is_no_schema_is_refused_and_nothing_is_fetched():
    pytest.importorskip("jsonschema")
    for truth, message in (("{", "is not a JSON schema"), ('{"type": "thing"}', "is not valid"), ("[]", "an object")):
        with pytest.raises(ValueError, match=message):
            ask(json_schema, "{}", truth)
    with pytest.raises(Exception, match="Unresolvable"):
        ask(json_schema, '{"a": 1}', {"$ref": "http://127.0.0.1:9/schema.json"})


# In the manager


def request(response: str, truth="5", source="mine", row=0) -> ScoreRequest:
    return ScoreRequest(source, response, truth, {}, f"a.parquet row {row}")


def scores(requests: list[ScoreRequest], *settings: str) -> list[Score]:
    with open_rewards(load([*settings, "reward_model.num_workers=1"]).config) as rewards:
        rewards.check(requests[:1])
        return rewards.score(requests)


def test_a_rule_by_name_scores_rows_of_any_source():
    asked = [request("5"), request(" 5", source="openai/gsm8k"), request("#### 5", source="openai/gsm8k")]
    found = scores(asked, "reward=exact_match")
    assert [(s.value, s.extras) for s in found] == [
        (1, {"exact_match": 1}),
        (1, {"exact_match": 1}),
        (0, {"exact_match": 0}),
    ]


def test_math_is_the_rule_of_its_sources():
    equal, other = scores([request(r"\boxed{\frac12}", "0.5"), request("0.5", "0.5")], "reward=math")
    assert (equal.value, other.value) == (1, 0)


def test_code_runs_the_tests_that_the_ground_truth_has():
    truth = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
    program, function = "```python\nprint(int(input()) + 1)\n```", "```python\ndef f(x):\n    return x\n```"
    asserts = json.dumps({"test_list": ["assert f(1) == 1"]})
    settings = ["reward=code", "reward_model.sandbox.isolation=unsafe", "reward_model.num_workers=1"]
    with open_rewards(load(settings).config) as rewards:
        half, all_of_it = rewards.score([request(program, truth), request(function, asserts)])
    assert half.value == half.extras["code"] == 0.5 and all_of_it.value == 1 and all_of_it.extras["acc"]


def test_several_rules_have_weights_and_arguments():
    settings = [
        "reward=[exact_match,regex]",
        "reward_weights=[1,0.2]",
        r"reward_kwargs={pattern: '^\d+$', ignore_case: true}",
    ]
    assert [s.value for s in scores([request("5"), request("6"), request("a", "A")], *settings)] == [1.2, 0.2, 1.0]


def test_a_catastrophic_pattern_is_counted_and_ends_nothing():
    with open_rewards(
        load(["reward=regex", "reward_kwargs={pattern: '^(a+)+$'}", "reward_model.num_workers=1"]).config
    ) as rewards:
        slow, fast = rewards.score([request("a" * 40 + "!"), request("aaa")])
        process = rewards.pool.workers[0].supervisor.pid
        assert slow.timed_out and slow.value == 0 and fast.value == 1
        rewards.score([request("aa")])
        assert rewards.pool.workers[0].supervisor.pid == process, "its process lives on"


def test_rules_and_limited_functions_go_their_own_ways(tmp_path):
    (tmp_path / "judge.py").write_text("def judge(data_source, solution_str, ground_truth, extra_info): return 0.5")
    settings = [f"custom_reward_function.path={tmp_path}/judge.py:judge", "reward_model.reward_manager=rate_limited"]
    assert [s.value for s in scores([request("5"), request("x")], "reward=regex", *settings)] == [1.5, 0.5]


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        (["reward=exact_mach"], "reward", "did you mean 'exact_match'"),
        (["reward=[exact_match,mth]"], "reward", "did you mean 'math'"),
        (["reward=[math,math]"], "reward", "names math twice"),
        (["reward={math: 1}"], "reward", "not one of the values"),
        (
            ["reward=math", "reward_weights=[1,2]"],
            "reward_weights",
            r"1 rules of `reward` and 2 weights\n  fix: .*\[1\]",
        ),
        (["reward_weights=[1]"], "reward_weights", "leave reward_weights out"),
        (["reward_kwargs={pattern: a}"], "reward_kwargs", "none is named"),
        (
            ["reward=math", "reward_model.compute_score_kwargs={method: strict}"],
            "reward_model.compute_score_kwargs",
            "`reward`",
        ),
    ],
)
def test_a_config_that_names_no_such_thing_is_refused(settings, key, message):
    with pytest.raises(UserError, match=message) as error:
        load(settings)
    assert error.value.key == key


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        (
            ["reward=regex", "reward_kwargs={patern: a}"],
            "reward_kwargs",
            "regex takes no 'patern'\n  fix: did you mean 'pattern'",
        ),
        (
            ["reward=math", "reward_kwargs={pattern: a}"],
            "reward_kwargs",
            "math takes no 'pattern'\n  fix: leave it out",
        ),
        (["reward=regex", "reward_kwargs={pattern: '('}"], "reward_kwargs.pattern", "is not a regular expression"),
        (["reward=json_schema", "reward_kwargs={schema: /no/such.json}"], "reward_kwargs.schema", "No such file"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused_before_training(settings, key, message):
    with pytest.raises(UserError, match=message) as error:
        open_rewards(load(settings).config)
    assert error.value.key == key


def test_a_rule_without_its_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("paddock.rewards.rules.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'jsonschema, which is not installed\n  fix: pip install "paddock-rl'):
        open_rewards(load(["reward=json_schema"]).config)


def test_a_schema_may_be_a_file(tmp_path):
    pytest.importorskip("jsonschema")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    asked = [request('{"name": "Ann", "age": 3}'), request("{}")]
    assert [
        s.value for s in scores(asked, "reward=json_schema", f"reward_kwargs={{schema: {tmp_path}/schema.json}}")
    ] == [1, 0]


def test_a_row_that_a_rule_cannot_read_is_named():
    with pytest.raises(UserError, match=r"reward=exact_match: .*not a text.*on a.parquet row 3") as error:
        scores([request("x", {"a": 1}, row=3)], "reward=exact_match")
    assert "choose another rule" in error.value.fix


@pytest.mark.parametrize("rule", ["exact_match", "contains"])
def test_each_answer_of_a_list_in_the_data_is_right(tmp_path, rule):
    """From the file to the score: a column with several accepted answers, and one with a number."""
    rows = [{"question": "Where?", "answer": ["United Kingdom", "UK"]}, {"question": "How many?", "answer": [2, "two"]}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load([f"data.train_files={tmp_path / 'mine.jsonl'}", f"reward={rule}", "trainer.device=cpu"]).config
    asked = PromptDataset.train(config.data, byte_tokenizer()).rows([0, 1])
    given = [
        ScoreRequest(row.data_source, answer, row.ground_truth, row.extra_info, row.location)
        for row, answer in zip(asked * 3, ["UK", "two", "United Kingdom", "2", "Kingdom", "three"], strict=True)
    ]
    with open_rewards(config) as rewards:
        assert [score.value for score in rewards.score(given)] == [1, 1, 1, 1, 0, 0]


def test_an_argument_that_no_scorer_of_the_data_takes_is_named_in_a_warning(caplog):
    config = load(["reward_model.compute_score_kwargs={method: flexible}", "reward_model.num_workers=1"]).config
    with open_rewards(config) as rewards:
        rewards.check([request("5", source="openai/gsm8k")])
        assert caplog.messages == []
        rewards.check([request("5", source="lighteval/MATH")])
    (said,) = caplog.messages
    assert "reward_model.compute_score_kwargs.method has no effect: no scorer of lighteval/MATH takes it" in said
