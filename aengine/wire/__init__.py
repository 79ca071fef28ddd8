"""Messages of the schema, in both directions: the only room that names their fields."""
