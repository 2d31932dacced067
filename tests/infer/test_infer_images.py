"""Questions with images are answered as plain transformers answers them."""

import json

import pytest
import torch
from commands import trainkit
from pictures import EVERYTHING, Family, write_rows
from train.test_train_images_runs import write_recipe
from transformers import AutoModelForCausalLM

from trainkit.cli.commands.chat import Chat
from trainkit.errors import DataError
from trainkit.infer.conversation import ChatHistory
from trainkit.infer.engine import Engine
from trainkit.infer.sampling import SamplingOptions

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "idefics3", "mistral3"]
FAMILIES += ["gemma3", "gemma4", "internvl"]


@pytest.mark.sample("qwen3_vl", "qwen3_5", "idefics3", "gemma[34]")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_answers_are_those_of_plain_transformers(model_type, tmp_path):
    """Greedy, several at once of different lengths, some without an image."""
    family = Family(model_type, tmp_path)
    words = ("--prompts", "rows.jsonl", "-o", "out.jsonl", "--greedy")
    words = (*words, "--max-new-tokens", "6", "--dtype", "float32", "--batch-size", "4")
    said = trainkit(tmp_path, "generate", ".", *words)
    assert said.code == 0, said.err
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    model = family.plain().eval()
    assert len(rows) == 12
    for index, row in enumerate(rows):
        sample = family.data[index]
        batch = family.plain_batch(sample)
        size = row["num_prompt_tokens"]
        prompt = {
            name: value[:, :size] if value.shape == batch["labels"].shape else value
            for name, value in batch.items()
            if name != "labels"
        }
        found = sum(int(each == family.vision.token_id) for each in prompt["input_ids"][0])
        assert found == sum(image.num_tokens for image in sample.get("images", ()))
        with torch.inference_mode():
            ids = model.generate(**prompt, do_sample=False, max_new_tokens=6)[0, size:]
        text = family.tokenizer.decode(ids, skip_special_tokens=True)
        assert row["answer"] == text, index
        images = [part for part in row["messages"][0]["content"] if isinstance(part, dict)]
        paths = [part["path"] for part in images if part["type"] == "image"]
        assert paths == [image.path for image in sample.get("images", ())]


@pytest.mark.sample("gemma3")
@pytest.mark.parametrize("model_type", ["idefics3", "gemma3"])
def test_a_run_answers_held_out_rows_with_images(model_type, tmp_path):
    """While it trains and behind it, as `generate` does; a row whose image is gone is skipped."""
    (tmp_path / "held").mkdir()
    rows = write_rows(tmp_path / "held").read_text().splitlines()
    lost = {**json.loads(rows[0]), "id": "lost"}
    lost["messages"][0]["content"][0]["image_url"]["url"] = "nowhere.png"
    (tmp_path / "held/rows.jsonl").write_text("\n".join([*rows, json.dumps(lost)]))
    held = {"data": ["held/rows.jsonl"], "max_new_tokens": 5, "batch_size": 4, "every": 4}
    write_recipe(tmp_path, model_type, model__train=EVERYTHING, generation_eval=held)
    said = trainkit(tmp_path, "sft", "--config", "r.yaml", "-o", "run")
    assert said.code == 0, said.err
    assert "1 held-out rows cannot be asked" in said.err
    found = json.loads((tmp_path / "run/generation_eval.json").read_text())
    words = ("--prompts", "held/rows.jsonl", "-o", "o.jsonl", "--greedy", "--max-new-tokens", "5")
    (tmp_path / "held/rows.jsonl").write_text("\n".join(rows))
    assert trainkit(tmp_path, "generate", "run", *words).code == 0
    answers = [
        json.loads(line)["answer"] for line in (tmp_path / "o.jsonl").read_text().split("\n")[:-1]
    ]
    last = {row["conversation"]: row["given"] for row in found["rows"]}
    assert [last[number] for number in range(len(answers))] == answers
    assert "<image>" in found["rows"][0]["question"]


def test_a_chat_shows_pictures(tmp_path, capsys, tiny_qwen2):
    """The ids of training; a wrong path is named, and a model of text says that it takes none."""
    family = Family("idefics3", tmp_path)
    engine = Engine(family.plain(), family.tokenizer, vision=family.vision)
    chat = Chat(engine, ChatHistory(), SamplingOptions(max_new_tokens=3, greedy=True))
    sample = next(each for each in family.data if len(each.get("images", ())) == 2)
    with pytest.raises(DataError, match=r"there is no image .*nowhere\.png"):
        chat.command("/image nowhere.png")
    for image in sample["images"]:
        chat.command(f"/image {image.path}")
    chat.ask("What is this?")
    assert chat.last_ids.count(family.vision.token_id) == sum(
        e.num_tokens for e in sample["images"]
    )
    with pytest.raises(DataError, match="backticks"):
        chat.ask("<image>?")
    assert not chat.images
    chat.command(f"/save {tmp_path / 'saved.jsonl'}")
    saved = json.loads((tmp_path / "saved.jsonl").read_text())["messages"][0]["content"]
    assert [part.get("path") for part in saved[:2]] == [image.path for image in sample["images"]]
    text = Engine(AutoModelForCausalLM.from_pretrained(tiny_qwen2), family.tokenizer)
    with pytest.raises(DataError, match="takes none"):
        Chat(text, ChatHistory(), SamplingOptions()).command(f"/image {sample['images'][0].path}")


def test_models_of_text_refuse_images(tiny_qwen2, tmp_path):
    row = {"messages": [{"role": "user", "content": "<image>?"}], "images": ["a.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    words = ("--prompts", "rows.jsonl", "-o", "out.jsonl")
    said = trainkit(tmp_path, "generate", tiny_qwen2, *words)
    assert said.code == 2
    assert "images of rows are not read" in said.err
    assert "rows.jsonl" in said.err
    said = trainkit(tmp_path, "generate", tiny_qwen2, *words, "--num-beams", "2")
    assert said.code == 2
