"""How first turns of a user may begin: generic instructions about everyday subjects.

They widen what a small model asks when it plays the user. Sampling the rest is left to the engine's `synth`.
"""

# fmt: off
_FRAMES = (
    "Explain {}", "Write a short story about {}", "What is {}", "How does {} work",
    "Give me a list of ideas about {}", "Write a poem about {}", "I have a question about {}",
    "Can you help me with {}", "Describe {} in detail",
    "What are the advantages and disadvantages of {}", "Summarize the following text about {}:",
    "Write a Python program for {}", "Write a function in", "Pretend to be an expert in {}",
    "You are a teacher of {}.", "Rewrite the following paragraph about {}:",
    "Extract the main points from this text about {}:", "Compare {} with",
    "Tell me about the history of {}", "Why is {} important", "Create a plan for {}",
    "Write an essay about {}", "Solve this problem about {}:", "Teach me {} step by step",
    "Write a dialogue about {}", "What should I know before {}", "Is it true that", "Convert",
    "Calculate", "How many", "If", "Suppose", "A man", "Three friends", "Given", "Classify",
    "Answer the question:", "Fix the grammar of this sentence:",
    "Write a product description for {}", "Write a letter about {}", "Let's play a game about {}.",
    "Imagine that", "Which", "Who", "When", "Where", "Prove that", "Find", "Determine", "Design",
    "Implement", "Generate", "Read this review and", "The following table", "Here is some code:",
    "My", "I am", "Please", "Could you", "Do you", "In your opinion,", "Make a recipe with {}",
    "What is the best way of {}", "Write a speech about {}", "Give an example of {}",
    "Provide a summary of {}", "Identify", "Name five", "Choose", "Complete the sentence:",
    "Translate",
)
_SUBJECTS = (
    "algebra", "geometry", "probability", "statistics", "calculus", "number theory",
    "sorting algorithms", "databases", "web servers", "machine learning", "neural networks",
    "operating systems", "binary trees", "string processing", "file formats", "physics", "gravity",
    "electricity", "light", "thermodynamics", "chemistry", "acids", "batteries", "biology", "cells",
    "genetics", "evolution", "photosynthesis", "the immune system", "the brain", "medicine",
    "nutrition", "sleep", "exercise", "astronomy", "black holes", "the moon", "climate", "weather",
    "oceans", "volcanoes", "rivers", "forests", "animals", "birds", "dogs", "cats", "insects",
    "plants", "gardening", "farming", "cooking", "bread", "coffee", "tea", "restaurants", "music",
    "guitars", "painting", "sculpture", "films", "theatre", "novels", "poetry", "fairy tales",
    "dragons", "detectives", "robots", "space travel", "time travel", "pirates", "castles",
    "ancient Rome", "ancient Egypt", "the Middle Ages", "the Renaissance",
    "the industrial revolution", "wars", "democracy", "law", "human rights", "philosophy", "ethics",
    "logic", "religion", "language", "grammar", "teaching", "schools", "universities",
    "job interviews", "management", "marketing", "customer service", "small businesses", "money",
    "taxes", "banks", "inflation", "markets", "insurance", "trains", "cars", "bicycles", "aircraft",
    "ships", "bridges", "architecture", "houses", "cities", "villages", "mountains", "beaches",
    "holidays", "birthdays", "friendship", "families", "children", "parents", "love", "fear",
    "dreams", "happiness", "habits", "time management", "sports", "football", "chess", "puzzles",
    "board games", "computers", "phones", "the internet", "privacy", "security", "cameras",
    "photography", "fashion", "recycling", "energy", "solar panels", "water", "air pollution",
)
# fmt: on
_PLAIN_WEIGHT = 25  # how often a frame without a subject stands beside one with all of them


def openings() -> list[str]:
    """Return every opening; frames without a subject occur several times."""
    texts = []
    for frame in _FRAMES:
        if "{}" in frame:
            texts += [frame.format(subject) for subject in _SUBJECTS]
        else:
            texts += [frame] * _PLAIN_WEIGHT
    return texts
