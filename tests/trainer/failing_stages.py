"""Functions that worker processes of the acceptance run call in tests: they fail after some rows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping

from swarmtrain.trainer.acceptance.rows import Row


def yield_rows_and_fail(count: int, how: str) -> Iterator[Row]:
    """Yield `count` rows, then raise an error or hang."""
    print("noise on stdout")
    for number in range(count):
        yield Row(f"row {number}", values={"number": number})
    if how == "raise":
        raise ValueError("no more rows")
    time.sleep(600)


def yield_row_for_each_item(items: Mapping[str, bool]) -> Iterator[Row]:
    """Yield a row for each item; the process ends at the first whose value is true."""
    for name, dies in items.items():
        if dies:
            os._exit(7)
        yield Row(name)
