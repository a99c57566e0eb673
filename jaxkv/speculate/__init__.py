"""Speculative decoding: who guesses the next tokens, and the program that checks them. A guess never changes an answer, only its pace."""
