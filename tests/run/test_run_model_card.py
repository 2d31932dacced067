"""The model card: a real one, whatever the names and paths of a user hold."""

import ast
import re

import pytest
import yaml
from huggingface_hub import ModelCard

from trainkit.run.report import model_card, write_model_card

HOSTILE = (
    *("plain", "a b", "two\nlines\n---\nlicense: mit", "code`tick``s", "[link](javascript:x)"),
    *("<script>x</script>", "a|b|c", "*bold* _it_ # no heading", "key: value # comment"),
    "'single' \"double\" \\",
    "{{ jinja }} {% x %}",
    "名前 \u2028 é",
    "!tag &anchor *alias %x @y",
)


def fill(run, path):
    figures = {"rows": 5, "kept": 4, "dropped": 1, "cut": 0, "tokens": 50, "trained_tokens": 20}
    files = [{"path": path, "sha256": "ab" * 32, **figures}]
    run.write_json(run.data, {"train": {"files": files}})
    run.write_text(run.recipe, f"name: x\n# {path}\n")
    run.write_json(run.generation_eval, {"accuracy": 0.75, "num_total": 4})


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.parametrize("name", HOSTILE)
def test_the_card_reads_a_user_s_text_as_text(name, adapter, trained_run):
    fill(trained_run, name)
    trained_run.name = name
    text = model_card(trained_run, base_model=name, adapter=adapter)
    card = ModelCard(text)
    assert card.data.library_name == ("peft" if adapter else "transformers")
    assert card.data.to_dict().keys() <= {"library_name", "base_model", "pipeline_tag", "tags"}
    assert card.data.base_model in (None, name)
    assert ("lora" in card.data.tags) == adapter
    head, body = text.split("\n---\n", 1)
    assert yaml.safe_load(head.removeprefix("---\n"))["tags"][0] == "trainkit"
    lines = body.split("\n")
    assert lines[0].startswith("# ")
    # Seven columns of figures next to the name, however many bars it holds.
    (row,) = [line for line in lines if line.endswith("| 50 | 20 | abababababab |")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 9
    assert [line for line in lines if line.startswith("## ")] == [
        "## How to load it",
        "## Training",
        "## Data",
        "## Recipe",
    ]
    assert not re.search(r"(?<![\\`])<script", body.split("## How")[0])
    code = body.split("```python\n")[1].split("\n```")[0]
    loads = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    places = [call.args[0].value for call in loads if isinstance(call.args[0], ast.Constant)]
    assert set(places) <= {"DIRECTORY", re.sub(r"[\x00-\x1f\u2028]+", " ", name)}


def test_the_card_says_what_came_of_it(trained_run):
    fill(trained_run, "data.jsonl")
    write_model_card(trained_run, base_model="some/base", adapter=False)
    text = trained_run.model_card.read_text()
    assert 'base_model: "some/base"' in text
    assert "75.0% of 4" in text
    assert "| steps | 60 |" in text
    assert "name: x" in text
