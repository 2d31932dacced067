"""Scores through our batches are those of the harness's own model class."""

import pytest
import torch
from set_files import PARTS

from trainkit.evals.model import PromptStyle, TrainedModel
from trainkit.evals.run import evaluate_model
from trainkit.evals.tasks import TaskChoice, load_tasks

# Sums of up to 40 log-probabilities in fp32, computed in batches of other shapes: 40 x 2^-23 x the
# size of a logit (below 100) x the few roundings of two layers.
TOLERANCE = 2e-3


def ours(model, tokenizer, **options):
    style = PromptStyle(tokenizer, chat=options.pop("chat", False))
    settings = {"stop_ids": [tokenizer.eos_token_id], "max_length": 4096, **options}
    return TrainedModel(model, style, **settings)


def theirs(model, tokenizer):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, max_length=4096)


@pytest.fixture(scope="module", params=[False, True], ids=["text", "chat"])
def both(request, sets, loud_model, tiny_tokenizer):
    """Every sample of our own class and of the harness's, by task and place."""
    import lm_eval.evaluator

    names = ["boolq", "mmlu_anatomy", "gsm8k"] if request.param else PARTS
    chosen = TaskChoice(names, data=str(sets), allow_code=True)
    tasks = load_tasks(chosen)
    for task in tasks.tasks.values():
        if task.OUTPUT_TYPE == "generate_until":
            task.config.generation_kwargs["max_gen_toks"] = 12
    found = evaluate_model(
        ours(loud_model, tiny_tokenizer, chat=request.param),
        tasks,
        limit=None,
        chat=request.param,
        settings={},
    )
    plain = load_tasks(chosen)
    for task in plain.tasks.values():
        if task.OUTPUT_TYPE == "generate_until":
            task.config.generation_kwargs["max_gen_toks"] = 12
    reference = lm_eval.evaluator.evaluate(
        theirs(loud_model, tiny_tokenizer),
        dict(plain.loaded),
        bootstrap_iters=0,
        apply_chat_template=request.param,
        fewshot_as_multiturn=request.param,
        confirm_run_unsafe_code=True,
    )
    return found, reference


def test_every_log_likelihood_and_text_is_that_of_the_harness(both):
    found, reference = both
    assert set(found.samples) == set(reference["samples"])
    num_scored = num_written = 0
    for task, rows in reference["samples"].items():
        own = {(row["doc_id"], row["filter"]): row for row in found.samples[task]}
        for row in rows:
            mine = own[row["doc_id"], row["filter"]]
            for (first, *_), (second, *_) in zip(mine["resps"], row["resps"], strict=True):
                if isinstance(first, str):
                    assert first == second
                    num_written += 1
                else:
                    assert first[0] == pytest.approx(second[0], abs=TOLERANCE)
                    assert first[1] == second[1]
                    num_scored += 1
    assert num_scored >= 24
    assert num_written >= 6


def test_every_score_is_that_of_the_harness(both):
    found, reference = both
    for score in found.scores:
        metric, _, kind = score.metric.partition("/")
        figures = reference["results"][score.task]
        kinds = [key.partition(",")[2] for key in figures if key.startswith(f"{metric},")]
        assert figures[f"{metric},{kind or kinds[0]}"] == score.value
        assert score.version == str(reference["versions"][score.task])
        assert score.shots == reference["n-shot"][score.task]


@pytest.mark.parametrize("batch_size", [None, 1, 7])
def test_shared_beginnings_and_batches_change_nothing(loud_model, monkeypatch, batch_size):
    from trainkit.evals import likelihood
    from trainkit.evals.likelihood import Scorer

    monkeypatch.setattr(likelihood, "_SHORTEST_BEGINNING", 8)
    monkeypatch.setattr(likelihood, "_FEWEST_SAVED", 16)
    generator = torch.Generator().manual_seed(0)

    def ids(count):
        return tuple(torch.randint(0, 250, (count,), generator=generator).tolist())

    begin, other = ids(40), ids(30)
    pairs = [(begin + ids(1 + n), ids(1 + n % 3)) for n in range(9)]
    pairs += [(other + ids(2), ids(1)) for _ in range(4)]
    pairs += [(ids(3), ids(2)), (begin, ids(1)), (begin, ids(1))]
    several = begin + ids(6)  # one context, answers of 1 to 5 tokens, two of them alike at first
    pairs += [(several, ids(1 + n)) for n in range(5)]
    pairs += [(several, pairs[-1][1][:-1] + ids(1)), (other, ids(4))]
    scorer = Scorer(loud_model, max_length=256, pad_id=0, batch_size=batch_size)
    shared = [beginning for beginning, _ in scorer._groups(scorer._rows(pairs)) if beginning]
    assert [len(each) for each in shared] == [len(other), len(begin)] or len(shared) == 2
    for (context, continuation), scored in zip(pairs, scorer.score(pairs), strict=True):
        whole = torch.tensor([context + continuation])
        with torch.no_grad():
            logits = loud_model(whole).logits[0, len(context) - 1 : -1].double()
        target = torch.tensor(continuation)
        expected = logits.log_softmax(-1)[torch.arange(len(target)), target].sum().item()
        assert scored[0] == pytest.approx(expected, abs=TOLERANCE)
        assert scored[1] == bool((logits.argmax(-1) == target).all())


def test_a_context_is_computed_once_for_answers_of_one_token(loud_model):
    from trainkit.evals.likelihood import Scorer

    context = tuple(range(50, 90))
    pairs = [(context, (n,)) for n in range(4)] + [(context, (3, 4, n)) for n in range(2)]
    seen = []
    handle = loud_model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].numel())
    )
    Scorer(loud_model, max_length=256, pad_id=0).score(pairs)
    handle.remove()
    assert seen == [40 + 2]


def test_a_prompt_that_is_too_long_loses_its_beginning_and_is_counted(loud_model):
    from trainkit.evals.likelihood import Scorer

    scorer = Scorer(loud_model, max_length=16, pad_id=0)
    long, short = (tuple(range(40)), (7, 8)), (tuple(range(25, 40)), (7, 8))
    first, second = scorer.score([long, short])
    assert first == second
    assert scorer.num_truncated == 1


def test_the_model_is_left_as_it_was(loud_model, tiny_tokenizer):
    head = loud_model.get_output_embeddings()
    ours(loud_model, tiny_tokenizer)._loglikelihood_tokens([(None, [1, 2, 3], [4])])
    assert not head._forward_pre_hooks


def test_a_template_is_compiled_once_and_not_for_every_question(
    sets, loud_model, tiny_tokenizer, monkeypatch
):
    import lm_eval.utils

    compiled = []
    compile_template = lm_eval.utils.env.compile
    monkeypatch.setattr(
        lm_eval.utils.env,
        "compile",
        lambda source, *rest, **more: (
            compiled.append(source),
            compile_template(source, *rest, **more),
        )[1],
    )
    tasks = load_tasks(TaskChoice(["boolq"], data=str(sets)))
    before = len(compiled)
    evaluate_model(ours(loud_model, tiny_tokenizer), tasks, limit=None, chat=False, settings={})
    assert len(compiled) - before == len(set(compiled[before:])) > 0
    assert "from_string" not in vars(lm_eval.utils.env)
