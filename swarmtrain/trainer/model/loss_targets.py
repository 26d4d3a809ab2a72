"""IGNORE_INDEX, the target of positions that do not contribute to the loss."""

from __future__ import annotations

IGNORE_INDEX = -1
"""Target of a position that contributes neither to the loss, nor to the number of loss tokens, nor to the text's embedding vector."""
