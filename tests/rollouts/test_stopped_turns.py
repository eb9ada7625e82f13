"""A turn of a conversation ends at a stop string; the environment's words follow as behind one that ended by itself."""

from __future__ import annotations

import pytest
from talks import EOS, sampling, talk, texts, tokenizer

import paddock
from paddock.verl.agent_loop import unlike

DIGITS = ("2", "3", "4", "5", "6", "7", "8", "9")


class Search(paddock.Environment):
    """Answers a turn that ends with a digit, as a search agent's program answers </search>."""

    inline = True

    def __init__(self):
        self.seen: list[tuple[str, bool]] = []

    def step(self, answer):
        self.seen.append((answer.text, answer.stopped))
        return "+1=" if len(self.seen) < 3 else None

    def reward(self, ended):
        self.told = {"seen": self.seen}
        return 0.0


class Asks(Search):
    """Asks by messages, which the chat template writes."""

    def reset(self, row, seed):
        return [{"role": "user", "content": row["prompt"]}]


@pytest.mark.parametrize("engine", ["embedded", "hf"])
def test_a_turn_ends_with_its_string_and_the_environments_words_follow_in_the_same_text(engine):
    found = talk(Search, engine=engine, stop=DIGITS)
    for one, spans in zip(found, texts(found), strict=True):
        turns = spans[::2]
        assert all(turn.endswith((*DIGITS, "<eos>")) for turn in turns) and spans[1::2] == ["+1=", "+1="]
        assert all(not any(digit in turn[:-1] for digit in DIGITS) for turn in turns)
        assert one.done and one.extras["ended"] == "done"
        assert [text for text, _ in one.extras["extra_fields"]["seen"]] == [t.removesuffix("<eos>") for t in turns]
        assert all(stopped for _, stopped in one.extras["extra_fields"]["seen"])
    assert sum(turn.endswith(DIGITS) for spans in texts(found) for turn in spans[::2]) > 12


def test_keys_and_values_that_stay_behind_a_string_change_no_turn():
    kept, anew = (talk(Search, engine=engine, stop=DIGITS, temperature=0.0) for engine in ("embedded", "hf"))
    crowded = talk(Search, slots=2, stop=DIGITS, temperature=0.0)
    assert texts(kept) == texts(anew) == texts(crowded)


def test_min_tokens_are_those_of_each_turn():
    for spans in texts(talk(Search, stop=DIGITS, min_tokens=2, length=64)):
        assert all(len(tokenizer()(turn)["input_ids"]) >= 3 for turn in spans[::2])


@pytest.mark.parametrize("engine", ["embedded", "hf"])
def test_behind_a_string_the_template_ends_the_turn_as_one_that_was_cut(engine, monkeypatch):
    """The end of turn stands before the environment's message, written by it and not drawn."""
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    monkeypatch.setattr(tokenizer(), "chat_template", template)
    found = talk(Asks, engine=engine, stop=DIGITS)
    for one, spans in zip(found, texts(found), strict=True):
        for turn, said in zip(spans[::2], spans[1::2], strict=False):
            assert said == ("+1=" if turn.endswith("<eos>") else "<eos>+1=")
        whole = "".join(spans)
        rendered = tokenizer().apply_chat_template([*one.extras["messages"], *one.extras["conversation"]],
                                                   tokenize=False)  # fmt: skip
        asked = tokenizer().decode(one.prompt.tokens)
        assert rendered.removesuffix("<eos>") == (asked + whole).removesuffix("<eos>")
        assert one.spans[-1].log_probs and one.done
    assert any(span.tokens[0] == EOS for one in found for span in one.spans[1::2])


def test_loops_may_name_the_runs_strings_and_no_others():
    own = sampling(stop=("</s>", "x"), min_tokens=2)
    for given in ({"stop": ["</s>", "x"]}, {"stop": ("</s>", "x"), "min_tokens": 2}, {}):
        assert unlike(given, own, frozenset()) is None
    for given in ({"stop": "x"}, {"stop": None}, {"min_tokens": 0}):
        assert unlike(given, own, frozenset()) == next(iter(given))
    assert unlike({"stop": None}, sampling(), frozenset()) is unlike({"stop": []}, sampling(), frozenset()) is None
    assert unlike({"stop": "x"}, sampling(), frozenset()) == "stop"
