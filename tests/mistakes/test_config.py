"""Bad configs: what `plan` answers."""

from __future__ import annotations

from answers import Answer

CHAPTER = "The config"


def test_unknown_key(answer: Answer) -> None:
    """Unknown key

    A key that its section does not have. The nearest one is named; where none is near, all are.
    """
    answer.config("""\
        runer: {nodes: 2}
        data: {files: [x]}
        """)
    answer("swarmtrain plan config.yml")
