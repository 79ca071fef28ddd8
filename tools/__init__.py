"""Programs that are run by hand from the repository root. Not part of the package."""
