"""Many engines as one: which replica computes a request, and what becomes of it when that replica is lost."""
