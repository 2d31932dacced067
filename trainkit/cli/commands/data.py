"""``trainkit data``: look at what will be trained, judge it, measure it."""

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from trainkit.cli.options import JsonLines, RecipeChoice, TrustRemoteCode, echo, expanded, tell
from trainkit.errors import DataError, RecipeError
from trainkit.terminal import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainkit.data import DataOptions, PreparedData, Source
    from trainkit.data.preview import View
    from trainkit.data.vision import NoVision, Vision

app = typer.Typer()

NO_LIMIT = 10**9


@dataclass(frozen=True)
class DataChoice(RecipeChoice):
    """The data of a recipe, or files and the model whose tokenizer reads them."""

    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="A recipe.", show_default=False)
    ] = None
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="A file, directory, glob or hub name; may be given again."),
    ] = None
    model: Annotated[
        str | None, typer.Option("--model", help="A model directory or hub name: its tokenizer.")
    ] = None
    trust_remote_code: TrustRemoteCode = False
    mask: Annotated[str | None, typer.Option(help="assistant, last_assistant or none.")] = None
    columns: Annotated[
        list[str] | None,
        typer.Option(help="Our columns and the file's: instruction=QUESTION,output=REPLY."),
    ] = None


class Subject(NamedTuple):
    """What a command looks at."""

    sources: "tuple[Source, ...]"
    tokenizer: "PreTrainedTokenizerBase"
    options: "DataOptions"
    vision: "Vision | NoVision | None"
    evaluation: "tuple[Source, ...]" = ()


@app.command()
@expanded
def preview(
    choice: DataChoice,
    num: Annotated[int, typer.Option("-n", "--num", min=1, help="Samples drawn.")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the draw.")] = 0,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", "-o", help="Write one self-contained page here.", show_default=False
        ),
    ] = None,
    as_json: JsonLines = False,
) -> None:
    """Show real samples: trained text is shown «between marks» and in colour.

    Words of an answer that are not trained are shown ⟦in these⟧. After the drawn samples come the
    worst ones (the longest, the least trained, the most cut) and the first dropped rows of each
    reason.
    JSON objects have the keys id, source, input_ids, labels, tokens, num_trained_tokens,
    untrained_answer (ranges of tokens); those of dropped rows id, source, dropped, detail, row.
    """
    with _subject(choice) as subject:
        prepared = _prepare(subject, subject.options)
        from trainkit.data.preview import Authors, choose, dropped_rows, view

        chosen = choose(prepared, num, seed=seed)
        authors = Authors(prepared, subject.tokenizer, subject.options, subject.vision)
        authors.read([index for index, _ in chosen])
        views = [
            view(prepared, subject.tokenizer, index, why, authors.turns(index))
            for index, why in chosen
        ]
        bad = dropped_rows(prepared, with_excerpts=True)
        found = [*(each.to_dict() for each in views), *bad]
        for shown in found if as_json else ():
            tell(shown, as_json)
        roles = authors.table()
        if html is not None:
            from trainkit.data.preview import page

            control = [str(token) for token in subject.tokenizer.get_added_vocab()]
            title = f"{len(prepared):,} samples of {', '.join(prepared.source_names)}"
            html.write_text(page(views, roles, control, title, bad), encoding="utf-8")
        if not as_json:
            _print_views(views, subject.tokenizer)
            for row in bad:
                head = f"── {visible(row['id'])} · not used: {row['dropped']}"
                typer.secho(head, fg="red", bold=True)
                echo(f"{row['detail']}\n{row['row']}\n")
            _print_roles(roles, prepared)
            if html is not None:
                echo(f"written: {html}")


@app.command()
@expanded
def check(choice: DataChoice, as_json: JsonLines = False) -> None:
    """Say whether the data would train what it should; exit with 2 if it would not."""
    with _subject(choice) as subject:
        from trainkit.data.preview import dropped_rows, judge, measure
        from trainkit.data.summary import Finding, trained_and_evaluated, verdict

        prepared = _prepare(subject, subject.options)
        whole, summary = prepared, prepared.summary
        if summary["totals"]["cut"] or any("too_long" in f["reasons"] for f in summary["files"]):
            whole = _prepare(subject, subject.options.replace(max_length=NO_LIMIT))
        findings = judge(prepared, measure(whole))
        rows = {"rows": dropped_rows(prepared)}
        if subject.evaluation:
            held = _prepare(subject._replace(sources=subject.evaluation), subject.options)
            rows["evaluation data: rows"] = dropped_rows(held)
            twice = trained_and_evaluated(prepared, held)
            findings += [Finding("evaluation data", "warning", each) for each in twice]
            for finding in verdict(held.summary):
                if finding.status != "ok":  # a run goes on
                    check = f"evaluation data: {finding.check}"
                    findings.append(dataclasses.replace(finding, check=check, status="warning"))
    bad = [finding for finding in findings if finding.status == "error"]
    for finding in findings:
        lost = rows.get(finding.check, ())
        dropped = [f"{row['id']}: {row['dropped']}: {row['detail']}" for row in lost]
        if as_json:
            more = {"dropped": dropped} if finding.check in rows else {}
            tell({**dataclasses.asdict(finding), **more}, as_json)
            continue
        color = {"ok": "green", "warning": "yellow", "error": "red"}[finding.status]
        label = typer.style(f"{finding.status:<8}", fg=color, bold=True)
        typer.echo(f"{label} {finding.check}: {visible(finding.detail)}")
        fix = [f"fix: {finding.fix}"] if finding.status != "ok" and finding.fix else []
        for line in [*fix, *dropped]:
            echo(f"         {line}")
    if bad:
        names = ", ".join(finding.check for finding in bad)
        raise DataError(
            f"this data would train wrongly ({names})",
            fix="see the lines marked error, and the rows with: trainkit data preview",
        )
    if not as_json:
        typer.echo("verdict: fit to train on")


@app.command()
@expanded
def stats(
    choice: DataChoice,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", "-o", help="Draw the lengths here (PNG).", show_default=False),
    ] = None,
    as_json: JsonLines = False,
) -> None:
    """Lengths, trained share, duplicates, what each max_length would cut, packing efficiency."""
    with _subject(choice) as subject:
        from trainkit.data.preview import as_rows, draw_histogram, measure

        limit = subject.options.max_length
        whole = _prepare(subject, subject.options.replace(max_length=NO_LIMIT))
        figures = measure(whole)
        if plot is not None:
            draw_histogram(figures, limit if choice.config is not None else None, str(plot))
    for row in as_rows(figures) if as_json else ():
        tell(row, as_json)
    if as_json:
        return
    typer.echo(
        f"{figures.samples:,} samples, {figures.tokens:,} tokens, {figures.trained_tokens:,} "
        f"trained ({figures.trained_share:.1%}), {figures.duplicates:,} exact copies"
    )
    if figures.images:
        typer.echo(f"{figures.images:,} images in {figures.image_tokens:,} of the tokens")
    rows = dict(figures.rows)
    acts = ", ".join(f"{rows.pop(key):,} {key}" for key in ("kept", "dropped", "cut", "repaired"))
    reasons = "".join(f"; {reason}: {count:,}" for reason, count in rows.items())
    typer.echo(f"rows: {acts}{reasons}")
    for warning in whole.summary["listed_twice"]:
        typer.secho(f"warning: {visible(warning)}", fg="yellow")
    lengths = "  ".join(f"{name} {value:,.0f}" for name, value in figures.lengths.items())
    typer.echo(f"length in tokens: {lengths}\n")
    most = max(count for _, count in figures.histogram)
    for edge, count in figures.histogram:
        bar = "█" * round(40 * count / most)
        typer.echo(f"{'to ' + format(edge, ','):>12} {bar or '·':<40} {count:,}")
    typer.echo(f"\n{'max_length':>10}{'cut rows':>10}{'tokens':>12}{'trained':>12}{'packed':>9}")
    for cut in figures.cuts:
        typer.echo(
            f"{cut.max_length:>10,}{cut.samples:>10,}{cut.tokens:>12,}{cut.trained_tokens:>12,}"
            f"{cut.packing_efficiency:>9.1%}"
        )
    typer.echo(f"\nmax_length {figures.suggested_max_length:,} takes 99% of the samples whole")
    if plot is not None:
        typer.echo(f"written: {plot}")


@contextmanager
def _subject(choice: DataChoice) -> Iterator[Subject]:
    """Sources, tokenizer and options of a recipe, or of plain arguments.

    Samples go to the cache, as in training; without a recipe to a directory that is removed.
    """
    from trainkit.cli.quick_imports import leave_others_out, leave_torch_for_later

    leave_others_out()
    leave_torch_for_later()
    from trainkit.data import DataOptions, Source
    from trainkit.parallel.launch import quieten_imports

    quieten_imports()
    from trainkit.infer.locate import refuse_code
    from trainkit.models.tokenizer import check_exists, load_tokenizer, stop_token_ids
    from trainkit.options import ModelOptions
    from trainkit.recipe.document import is_override
    from trainkit.train.images import vision_of
    from trainkit.train.quiet import quieten_libraries

    quieten_libraries()
    config, overrides = choice.config, choice.overrides or []
    if overrides and overrides[0].endswith((".yaml", ".yml")):
        config, overrides = choice.given()
    data = [*(choice.data or ()), *(word for word in overrides if not is_override(word))]
    overrides = [word for word in overrides if is_override(word)]
    model, trusted = choice.model, choice.trust_remote_code
    changes: dict[str, Any] = {} if choice.mask is None else {"mask": choice.mask}
    named, evaluation = None, tuple[Source, ...]()
    if model is not None:
        named = ModelOptions(name_or_path=model, trust_remote_code=trusted)
        refuse_code(named, (), None)
    with tempfile.TemporaryDirectory() as scratch:
        if config is not None:
            from trainkit.data.sources import sources_of
            from trainkit.options.training import only_format
            from trainkit.recipe import load_recipe, read_chat_template
            from trainkit.train.images import data_options

            recipe = load_recipe(config, overrides).recipe
            if recipe.data.streaming and not data:
                raise RecipeError(
                    "this recipe streams its data; this command would first prepare all of it",
                    where="data.streaming",
                    fix="look at a part of it: add --data FILE#1000",
                )
            source = named or recipe.model.replace(
                trust_remote_code=trusted or recipe.model.trust_remote_code
            )
            only = only_format(recipe.objective, recipe.distill)
            own = [Source(path=path) for path in data] or recipe.data.train
            sources = sources_of(recipe.objective, only, recipe.data.with_format(own))
            held = () if data else recipe.data.with_format(recipe.data.eval_sources)
            evaluation = sources_of(recipe.objective, only, held)
            options = data_options(recipe, cache_dir=None)
            changes["chat_template"] = read_chat_template(recipe.data.chat_template)
        elif data and named:
            if overrides:
                raise RecipeError("overrides need a recipe", fix="give it with --config")
            source, sources = named, tuple(Source(path=path) for path in data)
            options = DataOptions(cache_dir=scratch)
        else:
            raise RecipeError(
                "there is nothing to look at",
                fix="give a recipe (--config FILE), or files of rows and --model MODEL",
            )
        if choice.columns:
            pairs = [pair.partition("=") for pair in ",".join(choice.columns).split(",")]
            if not all(ours and theirs for ours, _, theirs in pairs):
                raise RecipeError(
                    f"{','.join(choice.columns)!r} is not a list of our columns with the file's",
                    where="--columns",
                    fix="write it as in --columns instruction=question,output=reply",
                )
            renamed = {ours.strip(): theirs for ours, _, theirs in pairs}
            sources = tuple(each.replace(columns=each.columns | renamed) for each in sources)
        check_exists(source, is_model=model is None)
        options = options.replace(**changes, stop_token_ids=stop_token_ids(source))
        vision = vision_of(source, tokenizer := load_tokenizer(source), options.images)
        yield Subject(sources, tokenizer, options, vision, evaluation)


def _prepare(subject: Subject, options: "DataOptions") -> "PreparedData":
    import rich.console
    import rich.progress

    from trainkit.data import Ledger, Progress, prepare

    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.fields[rows]:,} rows, {task.fields[rate]:,.0f}/s"),
        rich.progress.TimeRemainingColumn(),
    )
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None, rows=0, rate=0.0)

        def show(step: Progress) -> None:
            elapsed = bar.tasks[0].elapsed or 1e-9
            bar.update(
                task,
                description=f"reading {step.source}",
                completed=step.bytes_done,
                total=step.bytes_total or None,
                rows=step.rows,
                rate=step.rows / elapsed,
            )

        return prepare(
            subject.sources,
            subject.tokenizer,
            options,
            ledger=Ledger(),
            progress=show,
            vision=subject.vision,
        )


def _print_views(views: "Sequence[View]", tokenizer: "PreTrainedTokenizerBase") -> None:
    control = sorted(map(str, tokenizer.get_added_vocab()), key=len, reverse=True)
    if any(view.missed for view in views):
        typer.secho("⟦in these⟧: words of an answer that are not trained\n", fg="red")
    for view in views:
        share = view.num_trained_tokens / len(view.input_ids)
        typer.secho(
            f"── {visible(view.id)} · {view.why} · source {visible(view.source)} · "
            f"{len(view.input_ids)} tokens, {view.num_trained_tokens} trained ({share:.0%})",
            bold=True,
        )
        for run in view.runs:
            text = visible(run.text).replace("\n", "↵\n")
            if run.missed:
                typer.secho(f"⟦{text}⟧", fg="red", bold=True, nl=False)
                continue
            if run.trained:
                typer.secho(f"«{text}»", fg="green", bold=True, nl=False)
                continue
            for token in control:
                text = text.replace(token, typer.style(token, fg="cyan"))
            typer.echo(text, nl=False)
        for image in view.images:
            size = f"{image['width']} x {image['height']}, {image['tokens']} tokens"
            typer.echo(f"\nimage: {visible(image['path'])} · {size}", nl=False)
        typer.echo("\n")


def _print_roles(roles: "Sequence[dict[str, Any]]", prepared: "PreparedData") -> None:
    typer.echo(f"{'written by':<12}{'tokens':>10}{'trained':>10}")
    for row in roles:
        typer.echo(f"{row['role']:<12}{row['tokens']:>10,}{row['trained_tokens']:>10,}")
    for note in prepared.summary["notes"]:
        typer.echo(f"note: {visible(note)}")
    for warning in prepared.summary["warnings"]:
        typer.secho(f"warning: {visible(warning)}", fg="yellow")
