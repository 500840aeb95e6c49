"""The embedded model, prepared once in the user's cache, and twenty real prompts for it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from replica.config import ModelConfig
from replica.model.prepare import prepare
from replica.model_card import TOKENIZER_FILE, ModelCard

QUESTIONS = (
    "What is the capital of France?",
    "Explain photosynthesis to a child in two sentences.",
    "Write a haiku about the sea.",
    "List three primary colors.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "What is 12 plus 30?",
    "Give me a recipe for pancakes, with the amounts of flour, milk and eggs for four hungry people.",
    "Why is the sky blue?",
    "Name a planet with rings.",
    "Summarize: The quick brown fox jumps over the lazy dog while the sun sets behind the hills.",
    "Write a Python function that returns the sum of a list of numbers, and explain each line of it.",
    "What do bees make?",
    "How many days are in a leap year?",
    "Tell me a short story about a robot who learns to paint pictures of the moon.",
    "What is the opposite of cold?",
    "Which ocean is the largest?",
    "Complete the sentence: Once upon a time, in a small village by the river,",
    "What are the benefits of regular exercise? Answer with a list of five short points.",
    "Hello!",
)


@cache
def embedded_card() -> ModelCard:
    return prepare(ModelConfig(model="embedded"), progress=print)


@cache
def chat_prompts() -> tuple[tuple[int, ...], ...]:
    """The questions as the model's chat template writes them."""
    tokenizer = Tokenizer.from_file(str(Path(embedded_card().folder) / TOKENIZER_FILE))
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    texts = [f"{system}<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
    return tuple(tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
