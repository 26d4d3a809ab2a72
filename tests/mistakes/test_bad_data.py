"""What `swarmtrain data` says of files that cannot be made into tokens, and of token files that are not as they were."""

from __future__ import annotations

import json

import pytest
from answers import Answer

CHAPTER = "The files it names"
pytest.importorskip("numpy", reason="data is prepared with numpy")


def test_bad_records(answer: Answer) -> None:
    """Text that cannot be read

    A line that is no JSON, or lacks its text; what was done before it stays in `PREFIX.parts`, and the same command goes on.
    """
    answer.situation("""printf '{"text": "a"}\\n{"text": "b"\\n{"body": "c"}\\n' > web.jsonl""")
    answer("swarmtrain data prepare web.jsonl --to tokens --tokenizer bytes", changes=r"tokens\.parts")
    answer("swarmtrain data prepare web.jsonl --to tokens --tokenizer bytes --key body", changes=r"tokens\.parts")


def test_nothing_to_prepare(answer: Answer) -> None:
    """No text, or no tokenizer

    Nothing is begun.
    """
    answer.file("web.jsonl", '{"text": "a"}\n', show=False)
    answer("swarmtrain data prepare 'web/**/*.jsonl' --to tokens --tokenizer bytes")
    answer("swarmtrain data prepare web.jsonl --to tokens --tokenizer tokenizer.json")
    answer("swarmtrain data prepare web.jsonl --to tokens --tokenizer bytes --end-token '</s>'")
    answer("swarmtrain data prepare web.jsonl --to tokens --tokenizer bytes --prompt-key text")


def test_bad_conversations(answer: Answer) -> None:
    """A conversation in the wrong order

    Roles take turns, and the assistant has the last word.
    """
    said = [{"role": role, "content": "Yes."} for role in ("user", "user", "assistant")]
    answer.file("chats.jsonl", f"{json.dumps({'messages': said})}\n", show=False)
    answer("swarmtrain data prepare chats.jsonl --to tokens --tokenizer bytes --chat", changes=r"tokens\.parts", since="error")
    answer.file("chats.jsonl", f"{json.dumps({'messages': said[:1]})}\n", show=False)
    answer("swarmtrain data prepare chats.jsonl --to tokens --tokenizer bytes --chat", changes=r"tokens\.parts", since="error")


def test_tokens_that_are_not_as_they_were(answer: Answer) -> None:
    """Token files that are not as they were written

    Copied in part, or changed on a disk.
    """
    answer.file("web.jsonl", '{"text": "some text"}\n{"text": "more of it"}\n', show=False)
    answer("swarmtrain data prepare web.jsonl --to tokens --tokenizer bytes", code=0, changes="tokens", show=False)
    answer.situation("printf X | dd of=tokens.bin bs=1 seek=3 conv=notrunc")
    answer("swarmtrain data verify tokens")
    answer.situation("truncate --size 12 tokens.bin")
    answer("swarmtrain data verify tokens")
    answer.situation("rm tokens.idx tokens.meta.json")
    answer("swarmtrain data verify tokens")
