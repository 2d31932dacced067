"""Tokens that a recipe adds: a killed run ends with the same bytes, and its model knows them."""

from commands import trainkit
from resume.test_resume_same_run import broken_and_whole


def test_killed_merged_and_asked(project):
    given = ['model.add_tokens=["number", "It is"]', "kernels=true"]
    parts, whole = broken_and_whole(project, given)
    assert parts == whole
    said = project.sft("--resume", "parts", 'model.add_tokens=["number"]')
    assert said.code != 0
    assert "model.add_tokens" in said.err
    trainkit(project.root, "merge", "parts", "merged").well()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(project.root / "merged")
    model = AutoModelForCausalLM.from_pretrained(project.root / "merged")
    assert tokenizer.encode("It is") == [len(tokenizer) - 1]
    assert model.config.vocab_size == len(model.get_output_embeddings().weight) == len(tokenizer)
    given = ("--prompts", "d.jsonl", "-o", "answers.jsonl", "--max-new-tokens", "2", "--greedy")
    said = trainkit(project.root, "generate", "parts", *given).well()
