"""Chat templates of model families, written down from their public form, each with a small tokenizer of its own.

The tokenizers are byte-level BPE with the special tokens of their family, so that no file of a hub is needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from paddock.data.chat import PromptEncoder
from paddock.data.dialogue import Dialogue

FOLDER = Path(__file__).parent
TEXT = """The answer is 12 and 345 of 6789, not 10. {"name": "search", "arguments": {"query": "weather in Paris"}}
<tool_call></tool_call><think>I should call the tool. Let me compute 12 + 34 = 46.</think> The result is 46.
Grüße aus Köln, 你好世界, приве́т, 🙂🚀. user assistant system tool functions parameters true false null
def add(a, b): return a + b  # 100 200 300 1234567890 11 22 33 44 55 66 77 88 99
You are a helpful assistant. What is the weather? It is sunny, 21 degrees. No. Again? Yes! Sure, here it is:

"""
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
         "<|python_tag|>")  # fmt: skip
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
           "[/TOOL_RESULTS]", "[TOOL_CALLS]")  # fmt: skip
DEEPSEEK = tuple(f"<｜{name}｜>" for name in (
    "begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep", "tool▁calls▁begin", "tool▁calls▁end",
    "tool▁call▁begin", "tool▁call▁end", "tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin",
    "tool▁output▁end",
))  # fmt: skip
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
HARMONY = ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
           "<|message|>", "<|call|>")  # fmt: skip
PHI = ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|tool_call|>",
       "<|/tool_call|>")  # fmt: skip
GRANITE = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
KIMI = ("[EOS]", "<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>")  # fmt: skip
MINIMAX = ("[e~[", "]~!b[", "]~b]", "<minimax:tool_call>", "</minimax:tool_call>")
COHERE = ("<BOS_TOKEN>", *(f"<|{name}|>" for name in (
    "END_OF_TURN_TOKEN", "START_OF_TURN_TOKEN", "SYSTEM_TOKEN", "USER_TOKEN", "CHATBOT_TOKEN", "START_THINKING",
    "END_THINKING", "START_ACTION", "END_ACTION", "START_RESPONSE", "END_RESPONSE", "START_TOOL_RESULT",
    "END_TOOL_RESULT",
)))  # fmt: skip
SEED = ("<seed:bos>", "<seed:eos>", "<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>")
HUNYUAN = ("<|startoftext|>", "<|eos|>", "<|extra_0|>", "<|extra_4|>")
NEMOTRON = ("<s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>")
LFM = ("<|startoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>",
       "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>")  # fmt: skip
INTERN = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|plugin|>", "<|action_start|>", "<|action_end|>")
GEMMA = ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")


@dataclass(frozen=True)
class Family:
    """Holds what a family has beside its template."""

    name: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    """Tokens that end a turn; the first is the tokenizer's end of text."""
    calls: str | None
    """Name of the format of tool calls; None: the template knows no tools."""
    start: str | None = None
    """Token that begins a text."""
    tags: tuple[str, ...] = ()
    """Tokens of their own that count as text."""
    system: bool = True
    """True: there is a system message."""
    tool_role: bool = True
    """True: the template writes messages of role tool."""
    writes_calls: bool = True
    """True: the template writes `tool_calls`; else calls stand in the content."""

    @property
    def template(self) -> str:
        return (FOLDER / f"{self.name}.jinja").read_text()

    def tokenizer(self) -> PreTrainedTokenizerFast:
        backend = Tokenizer.from_str(trained())
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in self.special])
        backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in self.tags])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token=self.stops[0],
            pad_token=self.stops[0],
            bos_token=self.start,
            clean_up_tokenization_spaces=False,
        )
        tokenizer.chat_template = self.template
        return tokenizer

    def dialogue(self, **template_kwargs: object) -> Dialogue:
        tokenizer = self.tokenizer()
        stops = frozenset(map(tokenizer.convert_tokens_to_ids, self.stops))
        return Dialogue(PromptEncoder(tokenizer, template_kwargs), stops)


@cache
def trained() -> str:
    """A byte-level BPE with some hundred merges, digits among them, as the tokenizers of most families are."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=letters, show_progress=False, min_frequency=1)
    backend.train_from_iterator([TEXT], trainer)
    return json.dumps(json.loads(backend.to_str()))


FAMILIES = {
    family.name: family
    for family in [
        Family("smollm2", CHATML, ("<|im_end|>", "<|endoftext|>"), None),
        Family("qwen25", CHATML, ("<|im_end|>", "<|endoftext|>"), "hermes", tags=TAGS[2:4]),
        Family("qwen3", CHATML, ("<|im_end|>", "<|endoftext|>"), "hermes", tags=TAGS),
        Family("qwen3_coder", CHATML, ("<|im_end|>", "<|endoftext|>"), "qwen3_coder", tags=TAGS[2:]),
        Family("hermes", (*CHATML, "<|begin_of_text|>"), ("<|im_end|>",), "hermes", start="<|begin_of_text|>"),
        Family("llama31", LLAMA, ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"), "llama3_json", start=LLAMA[0]),
        Family("llama2", ("<s>", "</s>"), ("</s>",), None, start="<s>", tool_role=False),
        Family("mistral_nemo", MISTRAL, ("</s>",), "mistral", start="<s>"),
        Family("gemma2", GEMMA, ("<eos>", "<end_of_turn>"), None, start="<bos>", system=False, tool_role=False),
        Family("phi4_mini", PHI, ("<|endoftext|>", "<|end|>"), "phi4", writes_calls=False),
        Family("deepseek_r1", DEEPSEEK, (DEEPSEEK[1],), None, start=DEEPSEEK[0], tags=TAGS[:2]),
        Family("deepseek_v31", DEEPSEEK, (DEEPSEEK[1],), None, start=DEEPSEEK[0], tags=TAGS[:2]),
        Family("glm45", GLM, ("<|endoftext|>", "<|user|>", "<|observation|>"), "glm45", tags=TAGS),
        Family("gpt_oss", HARMONY, ("<|return|>", "<|endoftext|>", "<|call|>"), "gpt_oss"),
        Family("deepseek_v32", DEEPSEEK, (DEEPSEEK[1],), "deepseek_v32", start=DEEPSEEK[0], tags=TAGS[:2]),
        Family("kimi_k2", KIMI, ("<|im_end|>", "[EOS]"), "kimi_k2"),
        Family("minimax_m2", MINIMAX, ("[e~[",), "minimax_m2", tags=TAGS[:2]),
        Family("command_a", COHERE, ("<|END_OF_TURN_TOKEN|>",), "cohere_command3", start=COHERE[0]),
        Family("seed_oss", SEED, ("<seed:eos>",), "seed_oss", start="<seed:bos>"),
        Family("hunyuan_a13b", HUNYUAN, ("<|eos|>",), "hunyuan_a13b", start="<|startoftext|>"),
        Family("lfm2", LFM, ("<|im_end|>",), "lfm2", start="<|startoftext|>", writes_calls=False),
        Family("internlm2", INTERN, ("</s>", "<|im_end|>"), "internlm", start="<s>"),
        Family("nemotron_nano2", NEMOTRON, ("<SPECIAL_12>",), "nemotron_json", start="<s>"),
        Family("olmo3", CHATML, ("<|im_end|>", "<|endoftext|>"), "olmo3"),
        Family("granite33", GRANITE, ("<|end_of_text|>",), "granite", writes_calls=False),
    ]
}
