"""A lab for the tests of the Trainer."""

import pytest
from lab import Lab


@pytest.fixture
def lab(tiny_tokenizer, tmp_path):
    return Lab(tiny_tokenizer, tmp_path)
