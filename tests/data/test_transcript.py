"""What a reward model reads: the policy's own tokens where it can, else the conversation written anew."""

from __future__ import annotations

import pytest
from byte_tokenizer import TEMPLATE, byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paddock.data.chat import PromptEncoder
from paddock.data.transcript import Transcriber, Transcript
from paddock.errors import UserError

CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "2+2?"}]
LINE_TEMPLATE = TEMPLATE.replace("<|end|>", "<|end|>\n")  # as Qwen's: a line break behind the end of a turn


def other_tokenizer(template: str | None = "{% for m in messages %}[{{ m.role }}] {{ m.content }}[/]{% endfor %}"):
    """Words and single letters in another order, and special tokens of its own."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["[/]", "[user]", "[assistant]", "[system]"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[/]", pad_token="[/]")
    tokenizer.chat_template = template
    return tokenizer


def read(transcriber: Transcriber, messages, text: str, stop: bool = True, decode_with=None) -> str:
    """The text of the one transcript of this answer."""
    tokenizer = transcriber.writer.tokenizer
    prompt = transcriber.writer.encode([messages], ["here"], "prompt")[0]
    answer = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * stop
    (found,) = transcriber.transcripts([messages], [prompt], [answer])
    return (decode_with or tokenizer).decode(found.prompt + found.answer)


def transcriber(template=TEMPLATE, reader=None, longest=None) -> Transcriber:
    tokenizer = byte_tokenizer(template)
    return Transcriber(PromptEncoder(tokenizer), reader, frozenset({tokenizer.eos_token_id}), longest)


def rendered(tokenizer, messages, text: str) -> str:
    conversation = [*messages, {"role": "assistant", "content": text}]
    return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=False)


@pytest.mark.parametrize("template", [TEMPLATE, LINE_TEMPLATE], ids=["end", "end and line break"])
@pytest.mark.parametrize("stop", [True, False], ids=["ended", "cut off"])
def test_kept_tokens_are_those_of_the_whole_conversation_as_the_template_writes_it(template, stop):
    """A published reward model was trained on such conversations: its score belongs to the last token of one."""
    same = byte_tokenizer(template)
    one = transcriber(template, same)
    assert one.keeps_tokens
    assert read(one, CHAT, "It is 4.", stop) == rendered(same, CHAT, "It is 4.")


def test_kept_tokens_are_not_tokenised_again():
    """What a policy writes need not be what its tokenizer would make of the text."""
    one = transcriber(reader=byte_tokenizer())
    odd = [5, 300, 7]  # the second is outside any text
    (found,) = one.transcripts([CHAT], [[1, 2]], [[*odd, 256]])
    assert (found.prompt, found.answer) == ([1, 2], [*odd, 256])


@pytest.mark.parametrize("stop", [True, False])
def test_plain_prompts_keep_their_tokens_as_sampled(stop):
    assert read(transcriber(reader=byte_tokenizer()), "2+2=", "4", stop) == "2+2=4" + "<|end|>" * stop


def test_another_tokenizer_reads_the_conversation_in_its_own_template_and_tokens():
    reader = other_tokenizer()
    one = transcriber(reader=reader)
    assert not one.keeps_tokens
    text = read(one, CHAT, "It is 4.", decode_with=reader)
    assert text == rendered(reader, CHAT, "It is 4.") == "[system] be kind[/][user] 2+2?[/][assistant] It is 4.[/]"


def test_another_template_is_reason_enough_to_write_anew():
    reader = byte_tokenizer("{% for m in messages %}{{ m.content }}|{% endfor %}")
    assert read(transcriber(reader=reader), CHAT, "4", decode_with=reader) == "be kind|2+2?|4|"


def test_a_reader_without_a_template_reads_the_policys_conversation():
    one = transcriber(reader=byte_tokenizer(None))
    assert one.keeps_tokens
    assert read(one, CHAT, "4") == rendered(byte_tokenizer(), CHAT, "4")


def test_without_a_reader_tokens_are_kept_whatever_they_mean_to_it():
    assert transcriber(reader=None).keeps_tokens


def test_special_tokens_inside_an_answer_are_seen_by_the_reader():
    """Else a policy could write what its reward model never sees."""
    reader = other_tokenizer()
    assert "<|user|>sure<think>" in read(transcriber(reader=reader), CHAT, "<|user|>sure<think>", decode_with=reader)


@pytest.mark.parametrize("stop", [True, False])
def test_a_plain_prompt_is_read_anew_with_the_readers_own_end(stop):
    reader = other_tokenizer()
    assert read(transcriber(reader=reader), "2+2=", "4", stop, decode_with=reader) == "2+2=4" + "[/]" * stop


def test_rows_of_both_kinds_mix():
    reader = other_tokenizer()
    one = transcriber(reader=reader)
    encode = one.writer.tokenizer
    answers = [encode(text, add_special_tokens=False)["input_ids"] for text in ("4", "5")]
    found = one.transcripts(["2+2=", CHAT], [[1], [1]], answers)
    texts = [reader.decode(each.prompt + each.answer) for each in found]
    assert texts == ["2+2=4", "[system] be kind[/][user] 2+2?[/][assistant] 5[/]"]


def test_messages_for_a_reader_that_cannot_write_them_name_the_trouble():
    with pytest.raises(UserError, match="no chat template"):
        read(transcriber(reader=other_tokenizer(None)), CHAT, "4")


def test_a_long_conversation_is_cut_at_its_end():
    one = transcriber(longest=6)
    (short, long) = one.transcripts(["ab", "abcd"], [[1, 2], [1, 2, 3, 4]], [[5, 6], [5, 6, 7]])
    assert (short.answer, short.cut) == ([5, 6], False)
    assert (long.prompt, long.answer, long.cut) == ([1, 2, 3, 4], [5, 6], True)
    assert Transcript([1, 2, 3], [4]).shortened(2) == Transcript([1, 2], [], cut=True)


def test_a_token_that_counts_as_padding_is_taken_from_the_end_and_nowhere_else():
    assert Transcript([9, 1], [9, 2, 9, 9]).without_last(9) == Transcript([9, 1], [9, 2])
    assert Transcript([1, 9], [9]).without_last(9) == Transcript([1], [])
    assert Transcript([9, 9], []).without_last(9) == Transcript([9], [])
    assert Transcript([1], [9]).without_last(None) == Transcript([1], [9])


def test_closing_is_what_the_template_writes_behind_an_answer():
    tokenizer = byte_tokenizer(LINE_TEMPLATE)
    assert tokenizer.decode(PromptEncoder(tokenizer).closing) == "<|end|>\n"
