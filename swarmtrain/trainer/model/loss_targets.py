"""The target value of positions without a loss."""

from __future__ import annotations

IGNORE_INDEX = -1
"""Target of a position without one: it counts neither in the loss, nor in the number of tokens, nor in a text's vector."""
