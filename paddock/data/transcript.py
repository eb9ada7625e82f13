"""What a reward model reads: a conversation with its answer, in tokens of the reward model's own tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from paddock.data.chat import Message, Messages, PromptEncoder, with_answer


@dataclass(frozen=True)
class Transcript:
    prompt: list[int]
    answer: list[int]
    """Empty where the whole conversation was written anew: prompt and answer are then one text."""
    cut: bool = False

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)

    def shortened(self, longest: int | None) -> Transcript:
        """Returns at most the first `longest` tokens."""
        if longest is None or len(self) <= longest:
            return self
        return Transcript(self.prompt[:longest], self.answer[: max(0, longest - len(self.prompt))], cut=True)

    def without_last(self, token: int | None) -> Transcript:
        """Removes this token from the end, however often it is there; at least one token stays."""
        prompt, answer = list(self.prompt), list(self.answer)
        while answer and answer[-1] == token:
            answer.pop()
        while not answer and len(prompt) > 1 and prompt[-1] == token:
            prompt.pop()
        return Transcript(prompt, answer, self.cut)


class Transcriber:
    """Answers of the policy as a reward model reads them.

    Where both tokenizers and templates are the same, tokens stay as they were sampled. Else the answer is decoded, and
    the conversation is written anew by the reward model's template and tokenizer.
    """

    def __init__(self, writer: PromptEncoder, reader: Any | None, stops: Collection[int], longest: int | None = None):
        """`reader` is the reward model's tokenizer; None: it reads the policy's tokens."""
        self.writer, self.stops, self.longest = writer, stops, longest
        template = writer.template_kwargs.get("chat_template", writer.tokenizer.chat_template)
        alike = reader is None or (same_tokens(writer.tokenizer, reader) and reader.chat_template in (None, template))
        self.reader = None if alike else PromptEncoder(reader, {"add_generation_prompt": False})

    @property
    def keeps_tokens(self) -> bool:
        return self.reader is None

    def transcripts(
        self, messages: Sequence[Messages], prompts: Sequence[list[int]], answers: Sequence[list[int]],
        turns: Sequence[list[Message]] | None = None,
    ) -> list[Transcript]:  # fmt: skip
        """Builds one `Transcript` per row: its messages, and prompt and answer in the policy's tokens.

        `turns`: the messages of each answer, if answers are conversations in an environment.
        """
        if self.reader is None:
            written = [
                Transcript(prompt, answer if isinstance(asked, str) else self.closed(answer))
                for asked, prompt, answer in zip(messages, prompts, answers, strict=True)
            ]
        else:
            written = self._rewritten(self.reader, messages, answers, turns)
        return [transcript.shortened(self.longest) for transcript in written]

    def closed(self, answer: list[int]) -> list[int]:
        """Returns an answer as its conversation holds it: with the end of the turn, whatever it stopped at."""
        return [*(answer[:-1] if answer and answer[-1] in self.stops else answer), *self.writer.closing]

    def _rewritten(
        self, reader: PromptEncoder, messages: Sequence[Messages], answers: Sequence[list[int]],
        turns: Sequence[list[Message]] | None,
    ) -> list[Transcript]:  # fmt: skip
        ended = [bool(answer) and answer[-1] in self.stops for answer in answers]
        written = self.writer.tokenizer.batch_decode(
            [answer[:-1] if end else answer for answer, end in zip(answers, ended, strict=True)],
            skip_special_tokens=False, clean_up_tokenization_spaces=False,
        )  # fmt: skip
        texts = [text.replace(self.writer.tokenizer.eos_token, "") for text in written]  # a template writes its own
        said: Sequence[list[Message]] = turns or [[{"role": "assistant", "content": text}] for text in texts]
        conversations: list[Messages] = [
            asked if isinstance(asked, str) else with_answer(asked, own)
            for asked, own in zip(messages, said, strict=True)
        ]
        locations = [f"row {row} of the batch" for row in range(len(texts))]
        encoded = reader.encode(conversations, locations, "prompt")
        last = [[reader.tokenizer.eos_token_id] if end else [] for end in ended]
        plain = reader.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [
            Transcript(ids, [*answer, *end] if isinstance(asked, str) else [])
            for ids, answer, end, asked in zip(encoded, plain, last, messages, strict=True)
        ]


def same_tokens(one: Any, other: Any) -> bool:
    """Equal texts get equal tokens, as far as that can be told."""
    for tokenizer in (one, other):
        tokenizer("")  # drops a padding or truncation that the tokenizer came with, and that is written down with it
    if not all(hasattr(tokenizer, "backend_tokenizer") for tokenizer in (one, other)):
        return False
    return bool(one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str())
