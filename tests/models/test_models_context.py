"""How long a text a model reads is said in one place."""

from pathlib import Path

import pytest

import trainkit
from trainkit.models.context import context_of

LLAMA_3_2 = {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 32.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
LINEAR = {
    "max_position_embeddings": 131072,
    "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}},
}
YARN = {
    "max_position_embeddings": 32768,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}


@pytest.mark.parametrize(
    ("config", "context"),
    [
        (LLAMA_3_2, 131072),
        (YARN, 131072),
        ({"text_config": LLAMA_3_2, "vision_config": {"max_position_embeddings": 64}}, 131072),
        ({"n_positions": 1024}, 1024),
        ({"model_max_length": 512}, 512),
        ({**LINEAR, "model_type": "llama"}, 1048576),
        ({"text_config": {**LINEAR, "model_type": "gemma3_text"}}, 131072),
        ({}, None),
    ],
)
def test_a_context_follows_the_rope_scaling(config, context):
    assert context_of(config) == context


def test_nobody_else_reads_it_off_a_configuration():
    """Next to those that write configurations: the converter, quickstarts and the benchmarks."""
    package = Path(trainkit.__file__).parent
    readers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "max_position_embeddings" in path.read_text("utf-8")
        and not path.relative_to(package).parts[0].startswith(("bench", "quickstart"))
        and "convert" not in path.parts
    }
    assert readers == {"models/context.py", "train/fit.py"}  # the second in a message
