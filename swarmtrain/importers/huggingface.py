"""The config.json of a model as Hugging Face keeps it: its shape, and the model itself to begin with."""

from __future__ import annotations

from swarmtrain.config import huggingface
from swarmtrain.importers.book import Book, Why

KEYS = frozenset(("model_type", "architectures"))
_PRECISIONS = ("float32", "bfloat16")
_ELSEWHERE = {
    "architectures": (Why.otherwise, "the fields of transformer_architecture say it"),
    "model_type": (Why.otherwise, "the fields of transformer_architecture say it"),
    "initializer_range": (Why.otherwise, "docs/explanation/model.md says what parameters begin with"),
    "use_cache": (Why.nothing, "a cache is for text that is made, not for training"),
    "bos_token_id": (Why.otherwise, "data prepare: what begins a document"),
    "eos_token_id": (Why.otherwise, "data prepare: what ends a document"),
    "pad_token_id": (Why.nothing, "samples are full"),
    "transformers_version": (Why.nothing, ""),
}


def read(book: Book, source: str, model: str | None) -> None:
    """Carry the config.json that came from `source`; `model` is the folder of the weights, if they lie beside it.

    Raises SwarmtrainError if no model here is like it.
    """
    here = huggingface.paths(book.source, source)
    kind, folded = huggingface.known(book.source, source), isinstance(book.get("rope_parameters"), dict)
    of = {field.ours: field.theirs for field in kind.fields}
    for path, value in here.items():
        theirs = of.get(path, "")
        if folded and not book.has(theirs):
            theirs = "rope_parameters" if path.startswith("rotary") else theirs
        if theirs and book.has(theirs):
            book.carry(theirs, f"transformer_architecture.{path}", value)
        else:
            book.put(f"transformer_architecture.{path}", value)
    _precision(book)
    for key, told in _ELSEWHERE.items():
        if book.has(key):
            book.leave(key, *told)
    book.use(*(key for key in kind.always if book.has(key)))
    if model:
        book.put("trainer.init_from", model)
        book.note("trainer.init_from is where the model lies here: it must be there on every node")
    else:
        book.note("no model lies beside it: name its folder as trainer.init_from, or begin with noise")
    book.note("transformer_architecture.sequence_length is the longest that the model takes: shorter samples cost less")


def _precision(book: Book) -> None:
    for key in ("dtype", "torch_dtype"):
        if book.get(key) in _PRECISIONS:
            book.carry(key, "transformer_architecture.precision")
        elif book.has(key):
            book.leave(key, Why.otherwise, "transformer_architecture.precision is what it is trained in: bfloat16, if the devices have it")
