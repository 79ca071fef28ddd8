"""Generations between proto messages and the engine: read, submitted, written as events, batched, resumed."""
