"""The config schema: one pydantic model per top-level key."""
