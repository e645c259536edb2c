"""Texts to measure with: our own, of the kinds that people ask a model for.

Random tokens would flatter or ruin a draft, so a benchmark reads text.
"""

from collections.abc import Sequence

from app.call import Message
from app.chat import ChatTemplate
from app.tokenizer import Tokenizer

QUESTIONS: tuple[str, ...] = (
    "Explain in plain words why the sky is blue in the day and red in the evening.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Give me step by step instructions for repotting a house plant.",
    "Write a Python function that returns the n-th Fibonacci number and explain how it works.",
    "What should a small bakery think about before it opens a second shop?",
    "Summarise the water cycle for a ten-year-old.",
    "Compare travelling by train with travelling by plane over a distance of 600 kilometres.",
    "Draft a polite e-mail that asks a landlord to repair a broken heater.",
    "List five habits that help people sleep better, and say why each one helps.",
    "How does a bicycle stay upright while it is moving?",
    "Describe how bread changes from dough to loaf in the oven.",
    "Write a SQL query that finds the three customers with the highest total of orders, and explain it.",
    "What are the advantages and disadvantages of working from home?",
    "Tell me how a library sorts its books and why that is useful.",
    "A train leaves at 9:40 and arrives at 13:15. How long does the journey take? Show your steps.",
    "Write a friendly product description for a hand-made wooden chair.",
)

PASSAGE = (
    "The harbour town wakes before the sun does. Boats come in with the tide, and the first voices on the"
    " quay are those of the people who unload crates and count them. A clerk writes every number in a "
    "long narrow book. By seven the market hall is full: cooks from the inns on the hill, families with "
    "baskets, a teacher who buys the same loaf every day. Prices are not fixed. They depend on the "
    "weather of the night, on how many boats stayed out, and on whether the road over the pass is open. "
    "When the road is closed, the town eats fish for a week and nobody complains much. In the afternoon "
    "the hall is washed with sea water, and the doors stay open so that the stone floor can dry. Children"
    " play there until the lamps are lit. Old people say that the hall was once a shipyard, and that the "
    "beams of the roof are the ribs of a ship that was never finished. Nobody has proved it, but visitors"
    " look up and nod. In winter the boats stay in, and the town turns to repair: nets are mended, hulls "
    "are painted, stairs get new boards. The clerk adds up the book of the year and pins a single sheet "
    "to the door. It says how many crates came in, how many were lost, and what the town has earned. "
    "People read it slowly, and then they talk about the spring. "
)


def bench_prompts(
    tokenizer: Tokenizer, template: ChatTemplate, context: int | None
) -> tuple[tuple[int, ...], ...]:
    """Return one chat prompt per question; with `context`, of about that many tokens each.

    A longer prompt is the question after as much of the passage as fits.
    """
    prompts = []
    for question in QUESTIONS:
        prompt = _encode(tokenizer, template, question)
        if context is not None and context > len(prompt):
            passage = _passage(tokenizer, context - len(prompt))
            prompt = _encode(tokenizer, template, f"{passage}\n\n{question}")
        prompts.append(prompt)
    return tuple(prompts)


def _encode(tokenizer: Tokenizer, template: ChatTemplate, text: str) -> tuple[int, ...]:
    return tokenizer.encode(template.render([Message("user", text)]), add_special_tokens=False)


def _passage(tokenizer: Tokenizer, num_tokens: int) -> str:
    token_ids: Sequence[int] = tokenizer.encode(PASSAGE, add_special_tokens=False)
    num_copies = -(-num_tokens // len(token_ids))
    return tokenizer.decode((list(token_ids) * num_copies)[:num_tokens])
