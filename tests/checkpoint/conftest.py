"""Tiny random GLM checkpoints in both layouts."""

from pathlib import Path

import pytest
from tiny_glm import glm_model, write_chatglm


@pytest.fixture(scope="session")
def glm():
    return glm_model()


@pytest.fixture(scope="session")
def glm_directory(glm, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("glm") / "native"
    glm.save_pretrained(directory, max_shard_size="100KB")
    return directory


@pytest.fixture(scope="session")
def chatglm_directory(glm, tmp_path_factory) -> Path:
    return write_chatglm(glm, tmp_path_factory.mktemp("chatglm") / "remote")
