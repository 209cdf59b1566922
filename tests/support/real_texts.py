"""What tests/real decodes, and how its texts are compared."""

from tiny_models import assert_same_text

QUESTIONS = (
    "Name three colours of the rainbow.", "Why is the sky blue?", "Write a haiku about rain.", "What is 12 + 30?",
    "Who wrote Hamlet?", "List five fruits, one on each line.", "Explain gravity to a child.",
    "Translate 'good morning' into French.", "Write a Python function that reverses a string.",
    "What is the capital of Japan?", "Repeat this: red blue red blue red blue.", "How do bees make honey?",
    "Give me a recipe for pancakes.", "What is a prime number?", "Summarise the story of Cinderella.",
    "Write a short letter to a friend who is ill.", "Count from one to ten.", "What are the days of the week?",
    "Write JSON with a name and an age.", "Is a tomato a fruit?",
)  # fmt: skip
STORY = (
    "The old lighthouse stood at the end of the pier. Every evening the keeper climbed its hundred steps, lit the "
    "lamp, and wrote the names of the passing ships into a book with a green cover. "
)


def assert_greedy(model, ours, theirs):
    """The same tokens up to the end of the text; or parted at a tie of the target's logits."""
    assert_same_text(model, trimmed(model, ours), trimmed(model, theirs))


def trimmed(model, sequences):
    """Each text without the padding after its end."""
    pad = model.generation_config.pad_token_id
    lengths = [int((row != pad).nonzero()[-1]) + 2 for row in sequences]
    return [row[:length] for row, length in zip(sequences, lengths, strict=True)]
