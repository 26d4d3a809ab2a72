"""The JSON schema of a config file, with which editors complete keys and mark errors."""

from __future__ import annotations

import json

from swarmtrain.config import Config

SCHEMA_FILE_NAME = "swarmtrain.schema.json"
EDITOR_LINE = f"# yaml-language-server: $schema={SCHEMA_FILE_NAME}\n"
"""First line of a config that is in one folder with the schema file: where the YAML language server of editors finds the schema."""


def render_json_schema() -> str:
    """Return the JSON schema (draft 2020-12) of a config file as JSON text. It allows all notations of a file, such as `shm_size: 8g`."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema(), "title": "swarmtrain config"}
    return json.dumps(schema, indent=1) + "\n"
