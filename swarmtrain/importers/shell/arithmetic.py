"""Evaluate integer arithmetic of a shell, without running any code."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN_PATTERN = re.compile(r"\s*(0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|\+\+|--|[-+*/%()])")
_ASSIGNMENT_PATTERN = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "%": 2}
_MAX_VALUE = 2**63
_MAX_TOKENS = 500
_MAX_DEPTH = 50


class ArithmeticValueError(ValueError):
    """The expression has no value at import; `name` is the variable whose value is missing, or empty."""

    def __init__(self, name: str = "") -> None:
        super().__init__(name)
        self.name = name


def evaluate_arithmetic(expression: str, get_variable: Callable[[str], int]) -> int:
    """Return the value of `expression`, with integers, variables, parentheses and the operators + - * / %.

    Raises ArithmeticValueError if it contains anything else, divides by zero or exceeds 64 bits; `get_variable` may raise it, too.
    """
    parser = _ArithmeticParser(_split_tokens(expression), get_variable)
    value = parser.parse_sum(1, 0)
    if parser.tokens:
        raise ArithmeticValueError
    return value


def find_arithmetic_names(expression: str) -> set[str]:
    """Return the names that the arithmetic `expression` assigns."""
    return {match[1] or match[2] for match in _ASSIGNMENT_PATTERN.finditer(expression)}


def parse_integer(text: str) -> int:
    """Return the integer `text` as the shell reads it: a leading 0 is octal, 0x hexadecimal. Raises ArithmeticValueError."""
    match = re.fullmatch(r"\s*([-+]?)(0[xX][0-9a-fA-F]+|\d+)\s*", text)
    if not match:
        raise ArithmeticValueError
    base = 16 if match[2][:2] in ("0x", "0X") else 8 if match[2].startswith("0") else 10
    try:
        return _check_range(int(match[1] + match[2], base))
    except ValueError:
        raise ArithmeticValueError from None


def _split_tokens(expression: str) -> list[str]:
    position = 0
    tokens: list[str] = []
    text = expression.strip()
    while position < len(text):
        match = _TOKEN_PATTERN.match(text, position)
        if not match or len(tokens) >= _MAX_TOKENS:
            raise ArithmeticValueError
        tokens.append(match[1])
        position = match.end()
    return tokens


def _check_range(value: int) -> int:
    if abs(value) >= _MAX_VALUE:
        raise ArithmeticValueError
    return value


class _ArithmeticParser:
    def __init__(self, tokens: list[str], get_variable: Callable[[str], int]) -> None:
        self.tokens = tokens
        self._get_variable = get_variable

    def parse_sum(self, minimum_precedence: int, depth: int) -> int:
        left = self._parse_operand(depth)
        while self.tokens and _PRECEDENCE.get(self.tokens[0], 0) >= minimum_precedence:
            operator = self.tokens.pop(0)
            right = self.parse_sum(_PRECEDENCE[operator] + 1, depth + 1)
            left = _check_range(_apply_operator(operator, left, right))
        return left

    def _parse_operand(self, depth: int) -> int:
        if not self.tokens or depth > _MAX_DEPTH:
            raise ArithmeticValueError
        symbol = self.tokens.pop(0)
        if symbol in ("+", "-"):
            return self._parse_operand(depth + 1) * (-1 if symbol == "-" else 1)
        if symbol == "(":
            value = self.parse_sum(1, depth + 1)
            if self.tokens[:1] != [")"]:
                raise ArithmeticValueError
            self.tokens.pop(0)
            return value
        return self._get_variable(symbol) if symbol.isidentifier() else parse_integer(symbol)


def _apply_operator(operator: str, left: int, right: int) -> int:
    if operator in "/%":
        if right == 0:
            raise ArithmeticValueError
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # toward zero
        return quotient if operator == "/" else left - quotient * right
    return {"+": left + right, "-": left - right, "*": left * right}[operator]
