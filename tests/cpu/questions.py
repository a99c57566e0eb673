"""What eight chats ask the real model."""

QUESTIONS = (
    "What is the capital of France?",
    "Tell me about the ocean.",
    "Name three colours.",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "What is gravity?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
)
