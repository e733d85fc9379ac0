"""What `bench quality` reads: chats that the model has with fixed prompts, and pages of needles.

Knows tokens and a tokenizer. The chats are made anew each time from fixed seeds, so that anyone can
repeat them and no text of others is needed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.models.model import Model
from chatkv.sampling import SamplingParams
from chatkv.sequence import Sequence
from chatkv.tokenizer import Tokenizer

REPLY_TOKENS = 320
TOPICS = (
    ("a lighthouse keeper", "the tides", "an old map"),
    ("bread baking", "sourdough", "a small kitchen"),
    ("binary search", "sorting", "a telephone book"),
)
QUESTIONS = (
    "Write a story about {0} and {2}.",
    "Explain {1} to a child of ten.",
    "List seven facts about {0}, one a line.",
    "What would {0} have to do with {2}?",
    "Summarise what you said so far in five sentences.",
    "Write a letter from {0} to a friend about {1}.",
    "Ask me three questions about {1}, then answer them yourself.",
    "Write a dialogue between two people who disagree about {1}.",
    "Describe {2} in detail.",
    "Continue the story from the beginning of our chat.",
)
FILLER = (
    "The market opens at eight and closes when the last cart has left.",
    "Rain was expected in the afternoon, but the sky stayed clear until dark.",
    "Most of the houses on this street were built before the bridge.",
    "She wrote the list twice, once in pencil and once in ink.",
    "A train passed every hour, and nobody in the village looked up.",
    "The library keeps its newspapers in the cellar, sorted by year.",
    "He had planted beans along the fence and forgotten about them.",
    "Two of the lamps were broken, so the hall was darker than usual.",
)
PLACES = (
    "Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Dublin", "Quito", "Riga", "Tunis", "Hanoi",
    "Porto", "Basel", "Accra", "Turin", "Delhi", "Perth", "Sofia", "Minsk", "Natal", "Leeds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Needles:
    """A long text with facts in it, and what is asked about each."""

    ids: list[int]
    asked: list[tuple[list[int], list[int]]]
    """(ids of the question, ids of the answer)."""


def chats(
    model: Model, count: int, tokens: int, progress: Callable[[str], None]
) -> list[tuple[list[int], list[int]]]:
    """Ids of so many chats, each of exactly so many tokens, and where their turns begin: prompts
    are fixed, replies sampled."""
    engine = Engine(model, EngineConfig(spec="none", drafters=()), costs={1: 1.0}, guard=False)
    talks = [list(model.tokenizer.head_ids()) for _ in range(count)]
    starts: list[list[int]] = [[] for _ in talks]
    longest = min(REPLY_TOKENS, max(8, tokens // 12))
    turn = 0
    while any(len(ids) < tokens for ids in talks):
        running: list[tuple[int, Sequence]] = []
        for place, ids in enumerate(talks):
            if len(ids) >= tokens:
                continue
            question = QUESTIONS[turn % len(QUESTIONS)].format(*TOPICS[place % len(TOPICS)])
            starts[place].append(len(ids))
            ids += model.tokenizer.user_ids(question, not turn)
            params = SamplingParams(
                temperature=0.7, top_p=0.95, seed=100 * place + turn, max_tokens=longest
            )
            running.append((place, engine.add(ids, [False] * len(ids), params)))
        engine.generate([seq for _, seq in running])
        for place, seq in running:
            engine.finish(seq)
            ended = seq.tokens[-1] in model.tokenizer.eos_ids
            talks[place] = [*seq.tokens, *model.tokenizer.closing_ids(ended)]
        turn += 1
        progress(f"texts: {min(map(len, talks))} of {tokens} tokens")
    engine.prefix.clear()
    return [(ids[:tokens], begun) for ids, begun in zip(talks, starts, strict=True)]


def needles(tokenizer: Tokenizer, tokens: int, count: int, seed: int = 0) -> Needles:
    """Facts at even distances in filler, about `tokens` tokens in all, and a question for each."""
    rng = random.Random(seed)
    places = rng.sample(PLACES, min(count, len(PLACES)))
    codes = [str(rng.randrange(1000, 10000)) for _ in places]
    facts = [
        tokenizer.encode(f" The code of {place} is {code}.")
        for place, code in zip(places, codes, strict=True)
    ]
    filler = tokens - sum(map(len, facts))
    ids: list[int] = []
    used = 0
    for number, fact in enumerate(facts):
        while used < filler * (number + 1) / (len(facts) + 1):
            sentence = tokenizer.encode(" " + rng.choice(FILLER))
            ids += sentence
            used += len(sentence)
        ids += fact
    while used < filler:
        sentence = tokenizer.encode(" " + rng.choice(FILLER))
        ids += sentence
        used += len(sentence)
    asked = [
        (tokenizer.encode(f" The code of {place} is"), tokenizer.encode(f" {code}"))
        for place, code in zip(places, codes, strict=True)
    ]
    return Needles(ids, asked)
