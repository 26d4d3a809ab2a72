"""What `swarmtrain data` says of files that cannot be made into tokens, and of token files that are not as they were."""

from __future__ import annotations

import json

import pytest
from error_cases import ErrorCase

CHAPTER = "The files it names"
pytest.importorskip("numpy", reason="data is prepared with numpy")


def test_bad_records(error_case: ErrorCase) -> None:
    """Invalid JSON record

    A line is not valid JSON, or lacks its text. Finished work is kept in `PREFIX.parts`, and the same command resumes from it.
    """
    error_case.run_setup("""printf '{"text": "a"}\\n{"text": "b"\\n{"body": "c"}\\n' > web.jsonl""")
    error_case("swarmtrain data tokenize web.jsonl --to tokens --tokenizer bytes", allowed_changes=r"tokens\.parts")
    error_case("swarmtrain data tokenize web.jsonl --to tokens --tokenizer bytes --key body", allowed_changes=r"tokens\.parts")


def test_nothing_to_prepare(error_case: ErrorCase) -> None:
    """Text or tokenizer is missing

    The command fails before it starts any work.
    """
    error_case.write_file("web.jsonl", '{"text": "a"}\n', show=False)
    error_case("swarmtrain data tokenize 'web/**/*.jsonl' --to tokens --tokenizer bytes")
    error_case("swarmtrain data tokenize web.jsonl --to tokens --tokenizer tokenizer.json")
    error_case("swarmtrain data tokenize web.jsonl --to tokens --tokenizer bytes --eos-token '</s>'")
    error_case("swarmtrain data tokenize web.jsonl --to tokens --tokenizer bytes --prompt-key text")


def test_bad_conversations(error_case: ErrorCase) -> None:
    """Conversation that the chat template cannot write

    A conversation needs an answer of the assistant, and the template must write all of it: ChatML, for instance, has no place for calls.
    """
    question = {"role": "user", "content": "Where is node 3?"}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "find_node", "arguments": {"number": 3}}}]}
    for messages in ([question], [question, call]):
        error_case.write_file("chats.jsonl", f"{json.dumps({'messages': messages})}\n", show=False)
        error_case(
            "swarmtrain data tokenize chats.jsonl --to tokens --tokenizer bytes --chat",
            allowed_changes=r"tokens\.parts",
            start_pattern="error",
        )


def test_tokens_that_are_not_as_they_were(error_case: ErrorCase) -> None:
    """Corrupt token file

    A token file was copied only in part, or has changed on disk.
    """
    error_case.write_file("web.jsonl", '{"text": "some text"}\n{"text": "more of it"}\n', show=False)
    error_case("swarmtrain data tokenize web.jsonl --to tokens --tokenizer bytes", code=0, allowed_changes="tokens", show=False)
    error_case.run_setup("printf X | dd of=tokens.bin bs=1 seek=3 conv=notrunc")
    error_case("swarmtrain data verify tokens")
    error_case.run_setup("truncate --size 12 tokens.bin")
    error_case("swarmtrain data verify tokens")
    error_case.run_setup("rm tokens.idx tokens.meta.json")
    error_case("swarmtrain data verify tokens")
