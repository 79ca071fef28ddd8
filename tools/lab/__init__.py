"""Laboratories: simulations, and drafts that know what comes. Commands of `aengine-bench` where it runs from a checkout."""
