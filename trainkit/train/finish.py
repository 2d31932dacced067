"""What a finished run leaves behind: the final model and its answers, then what describes it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from trainkit.auto_class import auto_class, is_own_code
from trainkit.checkpoint.weights.wrapper import restore_wrapper
from trainkit.models.loading import set_use_cache
from trainkit.run.report import draw_all, model_card, write_model_card
from trainkit.train.checkpoints import written_together
from trainkit.train.evaluations import undisturbed
from trainkit.train.hooks import LoopState
from trainkit.train.saves import Numbers, Saves, save_model


def finish(loop: LoopState, seconds: float) -> None:
    """The final model first, then everything that only describes it."""
    run, state, is_main = loop.run, loop.state, loop.run.process.is_main
    directory, console = run.directory, run.console
    facts = {
        "base_model": run.recipe.model.name_or_path,
        "loader": auto_class(loop.model.config).__name__,
        "adapter": isinstance(loop.model, PeftModel),
    }
    console.doing("writing the model")
    save_final(loop, directory.final, model_card(directory, **facts) if is_main else None)
    summary: dict[str, object] = {}
    if run.recipe.generation_eval is not None:
        from trainkit.train.generation_eval import answer

        console.doing("answering questions")

        def reload() -> nn.Module:
            dtype = loop.engine.saved_dtype(*next(iter(loop.model.named_parameters())))
            model: nn.Module = auto_class(loop.model.config).from_pretrained(
                directory.final, trust_remote_code=is_own_code(loop.model), dtype=dtype
            )  # or an adapter and its base
            return model.to(loop.args.device)

        model = loop.engine.whole_model(loop.model, reload)
        with undisturbed(model):
            result = answer(loop, model)
        others = {name: each for name, each in result.means.items() if name != "exact_match"}
        summary |= {name: f"{each:.4f} on held-out answers" for name, each in others.items()}
        summary["exact match"] = f"{result.accuracy:.1%} of {result.num_total} held-out answers"
        if is_main:
            directory.write_json(directory.generation_eval, result.to_dict())
    if not is_main:
        return
    console.doing("drawing the report")
    write_model_card(directory, **facts)
    draw_all(directory)
    rows = [row for row in state.log_history if "loss" in row]
    best: dict[str, object] = {}
    if loop.args.load_best_model_at_end and state.best_model_checkpoint is not None:
        figure = f"{loop.args.metric_for_best_model} {state.best_metric:.4f}"
        best["best"] = f"{Path(state.best_model_checkpoint).name}, {figure}"
    figures = {
        "steps": state.global_step,
        "loss": f"{rows[0]['loss']:.4f} -> {rows[-1]['loss']:.4f}" if rows else "none",
        **best,
        "time": f"{seconds:.0f} s",
        **summary,
        "model": directory.final,
        "report": directory.report,
    }
    console.finish(figures)
    if (hub := loop.hook(Saves).hub) is not None:
        hub.push_final(directory.final)


def save_final(loop: LoopState, target: Path, card: str | None = None) -> None:
    """Write ``final/``: weights or adapter, tokenizer, chat template, generation settings.

    Every rank calls it; sharded weights are gathered on the way.

    A final model from before the run was continued is replaced.
    """
    loop.hook(Numbers).check(loop, target.name)
    step = {"step": loop.state.global_step}
    with written_together(target, loop.ranks, step, replace=True) as inner:
        set_use_cache(loop.model.config, True)  # it is off for training; a served model wants it on
        try:
            save_model(loop, inner)
        finally:
            set_use_cache(loop.model.config, False)
        if loop.ranks.is_main_process:
            if not isinstance(loop.model, PeftModel):
                said = restore_wrapper(inner, Path(loop.model.config.name_or_path))
                if said is not None:
                    loop.run.console.note(f"final/: {said}")
            ends = loop.run.data.stop_token_ids
            generation_config(loop.model, loop.tokenizer, ends).save_pretrained(inner)
            if card is not None:
                (inner / "README.md").write_text(card, encoding="utf-8")


def generation_config(
    model: Any, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Iterable[int]
) -> GenerationConfig:
    """The model's generation settings, stopping at the trained end-of-turn tokens as well."""
    settings = GenerationConfig.from_dict(model.generation_config.to_dict())
    known = settings.eos_token_id
    already = [] if known is None else known if isinstance(known, list) else [known]
    settings.eos_token_id = list(dict.fromkeys([*stop_token_ids, *already])) or None
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.pad_token_id
    return settings
