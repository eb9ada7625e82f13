"""The proof before a run of several turns: what it finds in each family's template, and what it refuses."""

from __future__ import annotations

import json
import shutil

import pytest
from byte_tokenizer import TEMPLATE, byte_tokenizer
from conftest import ROOT

from paddock.cli import main
from paddock.data.chat import PromptEncoder
from paddock.data.dialogue import PROBE_TOOL, TEMPLATE_KEY, Dialogue
from paddock.data.proof import FORMAT_KEY, MODEL_KEY, Proof, prove, require_proof
from paddock.environments.calls import FORMATS, format_of
from paddock.errors import UserError
from tests.templates.families import FAMILIES, Family

TOOLS = [PROBE_TOOL]


def proof_of(name: str, tools: list | None = None) -> tuple[Proof, dict[str, str]]:
    dialogue = FAMILIES[name].dialogue()
    proof = prove(dialogue, format_of(None, dialogue.template), tools)
    return proof, dict(proof.rows)


def plain(template: str, stops: frozenset[int] | None = None) -> Dialogue:
    tokenizer = byte_tokenizer(template)
    return Dialogue(PromptEncoder(tokenizer), stops or frozenset({tokenizer.eos_token_id}))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_serves_several_turns_of_questions(name):
    proof, found = proof_of(name)
    assert proof.problems == []
    assert "end of turn" in found and "equality, questions" in found


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_tools_serve_where_the_template_shows_them_and_writes_their_results(family: Family):
    proof, found = proof_of(family.name, TOOLS)
    hidden = any("does not show tools" in note for note in proof.notes)
    assert (bool(proof.problems) or hidden) == (family.calls is None)
    if family.calls:
        assert found["format of calls"] == family.calls
        assert "~a result~" in found["a tool result"]


EQUAL = ["smollm2", "qwen25", "qwen3", "qwen3_coder", "hermes", "mistral_nemo", "gemma2", "phi4_mini", "deepseek_v31",
         "granite33", "deepseek_v32", "kimi_k2", "seed_oss", "hunyuan_a13b", "lfm2", "internlm2", "olmo3"]  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_prompt_answers_and_extensions_are_the_templates_own_tokens(name):
    assert "are the template's own" in proof_of(name)[1]["equality, questions"]


@pytest.mark.parametrize(
    ("name", "row", "part"),
    [
        ("qwen25", "prefix, thinking", "stable over 4 turns"),
        ("qwen3", "prefix, thinking", "earlier thinking is taken out"),
        ("glm45", "prefix, thinking", "earlier thinking is taken out"),
        ("mistral_nemo", "prefix, tools", "the tools move to the last question"),
        ("mistral_nemo", "prefix, system", "the system message moves to the last question"),
        ("deepseek_r1", "prefix, plain", "the opening of thinking is taken out"),
        ("gpt_oss", "prefix, plain", "<|return|>' becomes"),
        ("llama31", "prefix, plain", "the tokens at a seam are others"),
        ("gemma2", "prefix, system", "refused: the chat template refuses it: TemplateError: System role not supported"),
        ("qwen3", "earlier thinking", "takes it out; here it stays as sampled"),
        ("qwen25", "earlier thinking", "keeps it"),
        ("deepseek_r1", "thinking", "the generation prompt opens it"),
        ("qwen25", "separator", r"'\n'"),
        ("llama31", "separator", "none"),
        ("qwen25", "generation prompt", r"'<|im_start|>assistant\n'"),
        ("llama2", "generation prompt", "none"),
        ("qwen25", "a call", '{"name": "probe"'),
        ("granite33", "a call", "the template writes none"),
        ("kimi_k2", "a tool result", "## Return of call00000"),
        ("minimax_m2", "a tool result", r"]~b]tool\n<response>~a result~</response>[e~["),
        ("command_a", "a tool result", '"tool_call_id": "call00000"'),
    ],
)
def test_a_row_says_what_the_template_does(name, row, part):
    assert part in proof_of(name)[1][row]


def test_what_a_template_would_rewrite_is_noted_as_harmless():
    notes = proof_of("qwen3")[0].notes
    assert any("earlier thinking is taken out; history is never rendered anew here" in note for note in notes)


def test_a_date_in_the_template_is_noted():
    dialogue = plain("{{ strftime_now('%Y-%m-%d') }}" + TEMPLATE)
    assert any("date" in note for note in prove(dialogue).notes)


def test_a_model_that_does_not_stop_at_the_end_of_its_turn_is_refused():
    tokenizer = FAMILIES["qwen25"].tokenizer()
    text_end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    with pytest.raises(UserError, match=r"does not stop at the end of its turn, '<\|im_end\|>'") as error:
        require_proof(Dialogue(PromptEncoder(tokenizer), frozenset({text_end})))
    assert error.value.key == MODEL_KEY and "generation_config.json" in error.value.fix


def test_a_template_that_ends_no_turn_is_not_refused():
    """What the model stops at is not written by the template, and stays where it was drawn."""
    proof = require_proof(plain("{% for m in messages %}{{ m.content }}{% endfor %}"))
    assert "none: what the model stops at" in dict(proof.rows)["end of turn"]


def test_a_template_whose_later_turns_depend_on_earlier_ones_is_refused():
    counts = (
        "{% for m in messages %}<|{{ m.role }}|>{{ loop.index }}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(UserError, match="depends on the conversation before it") as error:
        require_proof(plain(counts))
    assert error.value.key == TEMPLATE_KEY


def test_a_template_that_refuses_a_second_question_is_refused():
    once = "{% if messages | length > 1 %}{{ raise_exception('one question') }}{% endif %}" + TEMPLATE
    with pytest.raises(UserError, match="one question") as error:
        require_proof(plain(once))
    assert error.value.key == TEMPLATE_KEY


def test_a_template_that_refuses_everything_and_none_at_all_are_refused():
    for template in ("{{ raise_exception('never') }}", None):
        with pytest.raises(UserError) as error:
            require_proof(plain(template))
        assert error.value.key == TEMPLATE_KEY


def test_tools_whose_results_a_template_cannot_write_are_refused():
    dialogue = FAMILIES["gemma2"].dialogue()
    require_proof(dialogue)
    with pytest.raises(UserError, match="cannot write messages of these roles") as error:
        require_proof(dialogue, FORMATS["hermes"], TOOLS)
    assert error.value.key == TEMPLATE_KEY


def test_a_template_that_does_not_show_tools_is_told_of_since_the_prompt_may():
    proof = require_proof(FAMILIES["smollm2"].dialogue(), FORMATS["hermes"], TOOLS)
    assert any("does not show tools" in note for note in proof.notes)


def test_a_format_that_does_not_read_the_templates_calls_is_refused():
    dialogue = FAMILIES["qwen3_coder"].dialogue()
    require_proof(dialogue, FORMATS["qwen3_coder"], TOOLS)
    with pytest.raises(UserError, match="the format hermes does not read a call as the template writes it") as error:
        require_proof(dialogue, FORMATS["hermes"], TOOLS)
    assert error.value.key == FORMAT_KEY


def test_a_prompt_may_show_calls_in_another_format_than_the_templates():
    dialogue, form = FAMILIES["qwen25"].dialogue(), FORMATS["mistral"]
    question = {"role": "user", "content": "2 + 3?"}
    example = {"role": "assistant", "content": 'I add.\n[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}'}
    proof = require_proof(dialogue, form, TOOLS, [question, example, question])
    assert any("the prompt shows calls as they are read" in note for note in proof.notes)
    for prompt in ([question], [question, {**example, "content": "5"}], [{**example, "role": "user"}]):
        with pytest.raises(UserError, match="does not read a call"):
            require_proof(dialogue, form, TOOLS, prompt)


def model_folder(folder, stops: list[int]) -> str:
    """A model whose files say when it stops; it needs no weights."""
    shutil.copytree(ROOT / "paddock/assets/tiny", folder, ignore=shutil.ignore_patterns("*.safetensors", "*.jinja"))
    FAMILIES["qwen3"].tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return str(folder)


def test_the_command_prints_the_proof(tmp_path, capsys):
    tokenizer = FAMILIES["qwen3"].tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert main(["template", model_folder(tmp_path / "model", [end])]) == 0
    shown = capsys.readouterr().out
    for part in ("prefix, thinking", "rewritten: earlier thinking is taken out", f"'<|im_end|>' ({end})", "hermes",
                 "A run of several turns can use this template"):  # fmt: skip
        assert part in shown


def test_the_command_refuses_with_reason_key_and_fix(tmp_path, capsys):
    tokenizer = FAMILIES["qwen25"].tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    model = tmp_path / "model"
    model_folder(model, [tokenizer.eos_token_id])
    tokenizer.save_pretrained(model)
    assert main(["template", str(model)]) == 2
    shown = capsys.readouterr().out
    assert "refused: actor_rollout_ref.model.path: the model does not stop at the end of its turn" in shown
    assert "fix: add it to" in shown
