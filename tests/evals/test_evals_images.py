"""Files of rows with images as benchmarks: right answers are those of plain transformers."""

import json

import pytest
from pictures import make_image, make_model_directory

from trainkit.cli.app import main
from trainkit.run.metrics import read_scores, read_verdicts

LENGTH = ("--max-new-tokens", "5", "--batch-size", "3")
QUESTIONS = [
    "Which?\nA. red\nB. blue",
    "How many?",
    "What is it?",
    "Where?",
    "Is it a cat?",
    "Why?",
]


def greedy(model, processor, parts, images):
    """The answer of transformers to one question alone, all of it plain."""
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    batch = processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    ids = model.generate(**batch, do_sample=False, max_new_tokens=5)
    new = ids[0, batch["input_ids"].shape[1] :]
    return processor.tokenizer.decode(new, skip_special_tokens=True)


@pytest.fixture(scope="module")
def benchmarks(request, tmp_path_factory):
    """A model with two benchmarks: OpenAI's parts, and LLaVA's placeholders in an array.

    Of their references plain transformers answers all but the last two of each, which are wrong.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = tmp_path_factory.mktemp(request.param)
    model_directory = make_model_directory(request.param, folder)
    model = AutoModelForImageTextToText.from_pretrained(model_directory).eval()
    processor = AutoProcessor.from_pretrained(model_directory)
    parts, placeholders, answers = [], [], []
    for number, question in enumerate(QUESTIONS):
        sides = [(20 + 7 * number, 60 - 5 * number), (33, 18)][: 1 + number % 2]
        images = [make_image(*side, seed=number) for side in sides]
        names = [f"{number}-{place}.png" for place in range(len(images))]
        for image, name in zip(images, names, strict=True):
            image.save(folder / name)
        seen = [{"type": "image"} for _ in names]
        answers.append(
            greedy(model, processor, [*seen, {"type": "text", "text": question}], images)
        )
        is_right = number < 4
        urls = [{"type": "image_url", "image_url": {"url": name}} for name in names]
        content = [*urls, {"type": "text", "text": question}]
        target = answers[-1] if is_right else "none of them"
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": target}]
        parts.append({"messages": turns})
        text = {"type": "text", "text": f"{question} Say it."}
        given = greedy(model, processor, [text, *seen], images)
        words = text["text"] + "<image>" * len(names)
        turns = [{"from": "human", "value": words}]
        turns += [{"from": "gpt", "value": given if is_right else f"not {given}"}]
        placeholders.append({"image": names, "conversations": turns})
    assert len(set(answers)) > 3, "a model that says the same of all proves nothing"
    (folder / "parts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in parts))
    (folder / "signs.json").write_text(json.dumps(placeholders))
    return folder


@pytest.mark.parametrize("benchmarks", ["gemma3", "idefics3"], indirect=True)
def test_two_benchmarks_of_pictures_are_scored_as_transformers_answers(benchmarks, tmp_path):
    tasks = f"{benchmarks / 'parts.jsonl'},{benchmarks / 'signs.json'}"
    out = tmp_path / "eval/one"
    assert main(["eval", str(benchmarks), "--tasks", tasks, "-o", str(out), *LENGTH]) == 0
    scores = {f"{row['task']}/{row['metric']}": row for row in read_scores(tmp_path)}
    assert list(scores) == [
        f"{task}/{metric}"
        for task in ("parts.jsonl", "signs.json")
        for metric in ("exact_match", "contains")
    ]
    for name in ("parts.jsonl", "signs.json"):
        score = scores[f"{name}/exact_match"]
        assert (score["num_samples"], score["value"]) == (6, pytest.approx(4 / 6))
        # The standard error of a share: sqrt(p (1 - p) / (n - 1)).
        assert score["stderr"] == pytest.approx((2 / 9 / 5) ** 0.5)
        assert sum(read_verdicts(score).values()) == 4
    assert (
        scores["parts.jsonl/exact_match"]["prompts"] != scores["signs.json/exact_match"]["prompts"]
    )
    rows = [json.loads(line) for line in (out / "samples/signs.json.jsonl").open()]
    assert [row["doc_id"] for row in rows] == list(range(6))
    assert [row["exact_match"] for row in rows] == [1, 1, 1, 1, 0, 0]


ONE = pytest.mark.parametrize("benchmarks", ["idefics3"], indirect=True)


@ONE
def test_other_images_of_the_same_size_are_other_prompts(benchmarks, tmp_path):
    for number in range(2):
        (tmp_path / f"{number}").mkdir()
        make_image(20, 60, seed=10 + number).save(tmp_path / f"{number}" / "0-0.png")
        first = (benchmarks / "parts.jsonl").read_text().split("\n")[0]
        (tmp_path / f"{number}" / "a.jsonl").write_text(first)
        words = ("--tasks", str(tmp_path / f"{number}" / "a.jsonl"), *LENGTH)
        out = str(tmp_path / "eval" / str(number))
        assert main(["eval", str(benchmarks), *words, "-o", out]) == 0
    found = [
        json.loads((tmp_path / "eval" / f"{number}" / "results.json").read_text())["scores"][0]
        for number in range(2)
    ]
    assert found[0]["prompts"] != found[1]["prompts"]
    assert found[0]["stderr"] is None


@ONE
@pytest.mark.parametrize(
    ("words", "where", "what"),
    [
        (("{lost}",), "lost.jsonl:7", "image_missing"),
        (("{torn}",), "torn.jsonl:2", "image_count"),
        (("{torn}", "--limit", "2"), "torn.jsonl:2", "image_count"),
        (("nowhere.jsonl",), "nowhere.jsonl", "no such file"),
        (("{fine},{other}",), "two files are called parts.jsonl", "rename one"),
        (("{fine}", "--shots", "2"), "--shots", "asked as they were trained"),
        (("{fine}", "--thinking", "on"), "--thinking", "leave it out"),
        (("{fine}", "--no-chat-template"), "--no-chat-template", "parts.jsonl"),
        (("{fine}", "--backend", "vllm"), "--backend vllm", "parts.jsonl"),
    ],
)
def test_what_cannot_be_scored_is_named(benchmarks, tmp_path, capsys, words, where, what):
    """As a row that cannot be trained on: line and code, and never a score of the others."""
    fine = benchmarks / "parts.jsonl"
    row = json.loads(fine.read_text().split("\n")[0])
    row["messages"][0]["content"][0]["image_url"]["url"] = "gone.png"
    (benchmarks / "lost.jsonl").write_text(fine.read_text() + json.dumps(row) + "\n")
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "B"}]
    torn = {"messages": turns, "images": ["0-0.png", "0-0.png"]}
    first = fine.read_text().split("\n")[0]
    (benchmarks / "torn.jsonl").write_text(f"{first}\n{json.dumps(torn)}\n")
    (tmp_path / "parts.jsonl").write_text(fine.read_text())
    places = {name: benchmarks / f"{name}.jsonl" for name in ("lost", "torn")}
    words = [word.format(**places, fine=fine, other=tmp_path / "parts.jsonl") for word in words]
    out = tmp_path / "out"
    assert main(["eval", str(benchmarks), "-o", str(out), "--tasks", *words]) == 2
    err = capsys.readouterr().err
    assert where in err
    assert what in err
    assert not out.exists()


@ONE
def test_no_row_behind_the_limit_is_read(benchmarks, tmp_path):
    first = (benchmarks / "parts.jsonl").read_text().split("\n")[0]
    (benchmarks / "few.jsonl").write_text(f"{first}\n{{")
    words = ("--tasks", str(benchmarks / "few.jsonl"), "-o", str(tmp_path / "out"), *LENGTH)
    assert main(["eval", str(benchmarks), *words, "--limit", "1"]) == 0


@ONE
def test_the_limit_counts_questions_and_not_conversations(benchmarks, tmp_path):
    turns = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B"}] * 3
    (benchmarks / "turns.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 2 + "{")
    words = ("--tasks", str(benchmarks / "turns.jsonl"), "-o", str(tmp_path / "out"), *LENGTH)
    assert main(["eval", str(benchmarks), *words, "--limit", "5"]) == 0
    assert len((tmp_path / "out/samples/turns.jsonl.jsonl").read_text().splitlines()) == 5


@ONE
def test_a_model_of_text_is_asked_no_picture(tiny_qwen2, benchmarks, tmp_path, capsys):
    words = ("--tasks", str(benchmarks / "parts.jsonl"), "-o", str(tmp_path / "out"))
    assert main(["eval", str(tiny_qwen2), *words]) == 2
    assert "parts.jsonl:1" in capsys.readouterr().err


def test_a_model_that_trains_is_asked_rows_elsewhere():
    from trainkit.errors import RecipeError
    from trainkit.evals.tasks import TaskChoice, load_tasks

    with pytest.raises(RecipeError, match="generation_eval asks"):
        load_tasks(TaskChoice(tasks=["charts.jsonl"]))
