"""Text to token ids and back, chats to prompts. Knows nothing of requests."""
