"""Trains a model to search before it answers: an environment whose tool looks into a small index of documents.

    python search.py                                  # the built-in model, two steps: seconds on a CPU, learns nothing
    python search.py Qwen/Qwen2.5-1.5B-Instruct       # a model that knows how to call tools, on a GPU

Put your own documents into DOCUMENTS and your questions into QUESTIONS; `Index` is BM25 in twenty lines.
"""

import math
import re
import sys
from collections import Counter

import paddock

DOCUMENTS = [
    "Marlow Bridge was opened in 1832. Its architect was William Tierney Clark.",
    "The Széchenyi Chain Bridge spans the Danube in Budapest. William Tierney Clark designed it.",
    "Hammersmith Bridge crosses the Thames in west London. The present bridge was designed by Joseph Bazalgette.",
    "Joseph Bazalgette was born in Enfield in 1819. He built the sewers of London.",
    "The Clifton Suspension Bridge spans the Avon Gorge. It is based on a design by Isambard Kingdom Brunel.",
    "Isambard Kingdom Brunel was born in Portsmouth in 1806.",
]
QUESTIONS = {
    "In which town was the designer of Hammersmith Bridge born?": "Enfield",
    "In which town was the designer of the Clifton Suspension Bridge born?": "Portsmouth",
    "Which bridge in Budapest has the same designer as Marlow Bridge?": "Chain Bridge",
    "In which year was the builder of the sewers of London born?": "1819",
}
TASK = "Search until you know the answer, then write it in one sentence.\n\n"
ROWS = [{"prompt": [{"role": "user", "content": TASK + question}], "answer": answer}
        for question, answer in QUESTIONS.items()]  # fmt: skip


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class Index:
    """Ranks documents by BM25 (k1 = 1.2, b = 0.75)."""

    def __init__(self, documents: list[str]):
        self.documents, self.counts = documents, [Counter(words(text)) for text in documents]
        self.mean = sum(count.total() for count in self.counts) / len(documents)
        holding = Counter(word for count in self.counts for word in count)
        self.weight = {word: math.log(1 + (len(documents) - n + 0.5) / (n + 0.5)) for word, n in holding.items()}

    def score(self, query: list[str], count: Counter[str]) -> float:
        length = 1.2 * (0.25 + 0.75 * count.total() / self.mean)
        return sum(self.weight[word] * 2.2 * count[word] / (count[word] + length) for word in query if word in count)

    def best(self, query: str, most: int) -> list[str]:
        scores = [self.score(words(query), count) for count in self.counts]
        order = sorted(range(len(scores)), key=lambda number: -scores[number])
        return [self.documents[number] for number in order[:most] if scores[number] > 0]


INDEX = Index(DOCUMENTS)


class Search(paddock.Environment):
    """Asks the row's question; pays 1 if the true answer stands in the last turn, and a tenth for having searched."""

    max_turns = 5

    @paddock.tool
    def search(self, query: str) -> str:
        """Returns the documents that fit a query best.

        Args:
            query: a few words, such as the name of a person or a place
        """
        return "\n".join(INDEX.best(query, most=2)) or "nothing was found"

    def reward(self, episode: paddock.Ended) -> float:
        searched = any(answer.calls for answer in episode.answers)
        return float(episode.row["ground_truth"] in episode.text) + 0.1 * searched


if __name__ == "__main__":
    assert INDEX.best("Where was Bazalgette born?", most=1) == [DOCUMENTS[3]]
    tool_results = {"actor_rollout_ref.rollout.multi_turn.max_tool_response_length": 1000}
    if len(sys.argv) > 1:
        run = paddock.Run(sys.argv[1], ROWS * 64, environment=Search, batch=32, n=8, lr=1e-6, prompt_length=512,
                          response_length=1024, steps=100, config=tool_results)  # fmt: skip
    else:
        run = paddock.Run("builtin:tiny", ROWS, environment=Search, batch=4, n=2, prompt_length=256,
                          response_length=64, steps=2, config=tool_results)  # fmt: skip
    print(run.train())
    run.close()
