"""Fixtures of the data tests: files, and preparing them."""

import json

import pytest

from trainkit.data import DataOptions, Ledger, Source, prepare


@pytest.fixture(autouse=True)
def _the_fast_way_of_a_tokenizer(monkeypatch):
    """As for the rows of a large file."""
    monkeypatch.setattr("trainkit.data.encode.PROVED_FROM", 0)


@pytest.fixture
def write(tmp_path):
    """Write rows as JSON lines (or bytes as they are) and return the path."""

    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(rows, bytes):
            path.write_bytes(rows)
        else:
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def ready(tmp_path, tiny_tokenizer):
    """Prepare paths or sources; the ledger's files lie in ``tmp_path``."""

    def ready(*sources, tokenizer=tiny_tokenizer, ledger=None, **options):
        sources = [s if isinstance(s, Source) else Source(str(s)) for s in sources]
        options.setdefault("cache_dir", str(tmp_path / "cache"))
        book = Ledger(tmp_path / "dropped.jsonl") if ledger is None else ledger
        data = prepare(sources, tokenizer, DataOptions(**options), ledger=book)
        book.close()
        return data

    return ready


@pytest.fixture
def dropped(tmp_path):
    """The lines of the ledger."""

    def dropped(name="dropped.jsonl"):
        path = tmp_path / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    return dropped
