"""What users see and every room shares: configuration, parameters, prompts, outputs, errors, and what an engine and a stream are. Imports
no other room."""

VERSION = "0.1.0"
