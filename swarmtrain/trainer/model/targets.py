"""What tokens are to be learned."""

from __future__ import annotations

IGNORE = -1
"""Target of a position that has none: it counts neither in the loss nor in the number of tokens, nor in a text's vector."""
