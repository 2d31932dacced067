"""``trainkit new``: a recipe to start from."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from trainkit.cli.options import JsonLines, echo, note, shipped, tell
from trainkit.errors import RecipeError

QUICKSTART = "quickstart"


def new(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A shipped recipe; without it they are listed.", autocompletion=shipped
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Fill one in for this model: a hub name, a directory."),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", "-d", help="Training files, with NAME or --model.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method", help="full, lora (the default), qlora, fp8, dpo, kto, ...; with --model."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            help="Make it fit, with --model: h100, 4090, 24g, ...; by default this machine's, or "
            "h100.",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="How many, with --model; by default 1.")
    ] = None,
    origin: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="A recipe, command line, script or notebook of axolotl, LLaMA-Factory, TRL, "
            "Unsloth or ms-swift.",
        ),
    ] = None,
    tool: Annotated[
        str | None, typer.Option("--tool", help="Whose it is, where --from does not find out.")
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="With --from: leave out what cannot be the same.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; NAME.yaml here.")
    ] = None,
    as_json: JsonLines = False,
) -> None:
    """List the recipes that come with trainkit, or write one here to be edited.

    ``trainkit new quickstart`` also makes its tiny model and rows; quickstart-images, pictures.
    ``--model`` fills a recipe in for a model, data and a GPU, ``--from`` translates another tool's.
    """
    given = [each for each in (name, model, origin) if each is not None]
    if len(given) > 1:
        raise RecipeError(
            "a recipe comes from one place", where="new", fix="give a NAME, --model or --from"
        )
    for option, value, companion, words in (  # an option would be passed over
        ("--data", data, name or model, "a NAME or --model"),
        ("--method", method, model, "--model"),
        ("--gpu", gpu, model, "--model"),
        ("--gpus", gpus, model, "--model"),
        ("--tool", tool, origin, "--from"),
        ("--lossy", lossy, origin, "--from"),
        ("--output", output, name or model or origin, "a NAME, --model or --from"),
    ):
        if value and companion is None:
            raise RecipeError(f"{option} goes with {words}", where=option)
    if origin is not None:
        _translate(origin, tool, lossy, output, as_json)
    elif model is not None:
        _fill_in(model, data or [], method or "lora", gpu, gpus or 1, output, as_json)
    elif name is None:
        _list(as_json)
    else:
        _write_shipped(name, data or [], output or Path(f"{name}.yaml"), as_json)


def _write_shipped(name: str, data: list[str], target: Path, as_json: bool) -> None:
    from trainkit.recipe.load import load_recipe
    from trainkit.recipe.write import shipped_recipes, shipped_text, with_values, write_text

    text = shipped_text(name)
    if data:
        objective = load_recipe(shipped_recipes()[name]).recipe.objective
        text = with_values(text, {"data.train": _sources(data, objective)})
    write_text(text, target)
    if name == f"{QUICKSTART}-images":
        from trainkit import quickstart_images

        quickstart_images.make_assets(Path(QUICKSTART) / "images")
    elif name.startswith(QUICKSTART):
        from trainkit.quickstart import make_assets

        make_assets(Path(QUICKSTART))
    _say(target, {"recipe": str(target)}, as_json)


ONE_GPU = "one_gpu_gib.json"
"""What `trainkit estimate` says of each shipped recipe, which takes seconds; a test compares."""


def _list(as_json: bool) -> None:
    from trainkit.recipe.load import load_recipe
    from trainkit.recipe.write import describe_recipe, shipped_recipes

    recipes = shipped_recipes()
    needs = json.loads(recipes[QUICKSTART].with_name(ONE_GPU).read_text())
    for each, path in recipes.items():
        recipe = load_recipe(path).recipe
        quantized = recipe.lora.quantize if recipe.lora else None
        method = "full" if recipe.lora is None else "lora" if quantized is None else "qlora"
        method = method if recipe.objective == "sft" else recipe.objective
        memory: float | None = needs[each]
        row = {
            "name": each,
            "method": method,
            "one_gpu_gib": memory,
            "about": describe_recipe(path),
        }
        size = "" if memory is None else f"{memory:.0f} GiB"
        width = max(map(len, recipes))
        tell(row, as_json, f"{each:<{width}}  {method:<7}  {size:>7}  {row['about']}")
    if not as_json:
        echo("GiB: memory that one GPU needs when it trains alone", err=True)


def _fill_in(
    model: str,
    data: list[str],
    method: str,
    gpu: str | None,
    gpus: int,
    output: Path | None,
    as_json: bool,
) -> None:
    from trainkit.cli.quick_imports import import_quickly

    import_quickly()
    from trainkit.estimate.estimate import host_gib
    from trainkit.estimate.fitted import METHODS, fitted_recipe
    from trainkit.estimate.gpus import gpu_of, this_gpu
    from trainkit.recipe.write import write_text

    if method not in METHODS:
        raise RecipeError(
            f"no method {method!r}", where="--method", fix=f"one of {', '.join(METHODS)}"
        )
    chosen = gpu_of(gpu) if gpu else this_gpu() or gpu_of("h100")
    of_model = _settings_of(model, method)
    found = fitted_recipe(model, _sources(data, method), method, chosen, gpus, of_model)
    target = output or Path(f"{Path(model).name.lower()}-{method}.yaml")
    write_text(found.text, target)
    expected = None if found.expected is None else round(found.expected.peak.needed_gib, 1)
    if found.changed and not as_json:
        echo(f"to fit {chosen.name}: {' '.join(found.changed)}", err=True)
    if expected is None and not as_json:
        echo(f"the size of {model} is not known here: see sft --dry-run", err=True)
    host = 0.0 if found.expected is None else round(host_gib(found.expected.plan), 1)
    if host and not as_json:
        echo(f"besides, {host:.0f} GiB of the host's memory are needed", err=True)
    absent = [each for each in data if _is_absent(each)]
    if absent and not as_json:
        echo(f"not here yet: {', '.join(absent)}", err=True)
    row = {
        "recipe": str(target),
        "needed_gib": expected,
        "host_gib": host,
        "changed": list(found.changed),
        "absent": absent,
    }
    _say(target, row, as_json, gpus)


def _settings_of(model: str, method: str) -> dict[str, bool]:
    """What the model has other than the shipped recipe; nothing where it is not at hand."""
    from trainkit.errors import ModelError
    from trainkit.estimate.shape import find_config
    from trainkit.places import local_path, refuse_file

    path = local_path(model)
    if path is not None and path.suffix.lower() != ".gguf":
        refuse_file(path, ModelError)
    is_directory = path is not None and path.is_dir()
    if path is not None and is_directory:
        from trainkit.models.files import check_model_files

        check_model_files(path, with_weights=False)  # of an adapter, say, no run can begin
    try:
        raw, place = find_config(model)
    except ModelError:
        if is_directory:
            raise
        return {}
    if "auto_map" in raw or not Path(place).is_file():
        return {}  # code of its own, which nobody has allowed to run, or the name of a shape
    from trainkit.train.quiet import quieten_libraries

    quieten_libraries()  # first: some libraries speak when they are imported
    from trainkit.models.tokenizer import load_config
    from trainkit.options import ModelOptions
    from trainkit.train.fit import settings_for

    source = place if place.lower().endswith(".gguf") else str(Path(place).parent)
    return settings_for(load_config(ModelOptions(name_or_path=source)), method)


def _sources(data: list[str], method: str) -> list[Any]:
    """The files as a recipe has them: with the columns of those that need them said."""
    found = {path: _columns(path, rows, method) for path in data if (rows := _first_rows(path))}
    return [{"path": path, "columns": found[path]} if found.get(path) else path for path in data]


def _first_rows(path: str) -> list[Any]:
    """The decoded first rows of a file or directory that is here; one must be readable."""
    from trainkit.options import Source

    place = Source.model_validate(path).path
    if not Path(place).expanduser().exists():
        return []
    from trainkit.data.files import read_rows, resolve_files
    from trainkit.data.formats import decode_row
    from trainkit.data.messages import RowError
    from trainkit.errors import DataError

    rows, wrong = list[Any](), "there is no row in it"
    for raw in islice(read_rows(resolve_files(place)[0]), 100):
        try:
            rows.append(decode_row(raw))
        except RowError as error:
            wrong = f"row {raw.line} cannot be read: {error}"
    if not rows:
        raise DataError(wrong, where=path, fix="look at its rows with: trainkit data check")
    return rows


def _columns(path: str, rows: list[Any], method: str) -> dict[str, str]:
    """Which columns a file's rows have for ours; refuses those that no run by the method takes."""
    from trainkit.data.formats import detect, guess_columns, pair_of
    from trainkit.options.training import OBJECTIVE_FORMATS

    wanted, row, columns = OBJECTIVE_FORMATS.get(method, "auto"), rows[0], dict[str, str]()
    problems = {each: _problem(rows, each) for each in (*OBJECTIVE_FORMATS.values(), "auto")}
    formats = {**OBJECTIVE_FORMATS, "lora": "auto"}
    fitting = [name for name, each in formats.items() if problems[each] is None]
    if wanted == "auto" and isinstance(row, dict) and detect(row) in (None, "alpaca"):
        pair = pair_of(row)
        found = dict(zip(("instruction", "output"), pair, strict=True)) if pair else {}
        found = found or (guess_columns(row) if not fitting else {})
        columns = {ours: theirs for ours, theirs in found.items() if ours != theirs}
        problems["auto"] = _problem(rows, "auto", columns)
    if problems[wanted] is not None:
        fix = "give other rows: docs/guides/data.md and preferences.md have their fields"
        if fitting:
            fix = f"it is one of: {', '.join(fitting)}; name that as the --method, or {fix}"
        if method == "distill":
            fix += "; or leave --data out, and name distill.teacher, which needs no answers"
        what = f"its rows are not those of {method}: {problems[wanted]}"
        raise RecipeError(what, where=path, fix=fix)
    if columns:
        said = ", ".join(f"{theirs!r} is read as {ours}" for ours, theirs in columns.items())
        echo(f"{path}: {said}; see trainkit data preview", err=True)
    return columns


def _problem(rows: list[Any], name: str, columns: dict[str, str] | None = None) -> str | None:
    from trainkit.data.formats import parse_row
    from trainkit.data.messages import Conversation, RowError, validate

    for number, row in enumerate(rows, 1):
        try:
            parsed = parse_row(row, name, columns, images=True)
            if isinstance(parsed, Conversation):
                validate(parsed, needs_assistant=True)
        except RowError as error:
            if number == 1 or error.reason == "undesired_answer":
                return f"row {number}: {error.detail}"
    return None


def _is_absent(data: str) -> bool:
    """A file that is named and not there; hub names and globs are found when a run starts."""
    path = Path(data).expanduser()
    is_file = bool(path.suffix) or data.startswith((".", "/", "~"))
    return is_file and not any(sign in data for sign in "*?[#") and not path.exists()


def _translate(
    origin: Path, tool: str | None, lossy: bool, output: Path | None, as_json: bool
) -> None:
    from trainkit.recipe.translate.draft import TOOLS
    from trainkit.recipe.translate.engine import translate
    from trainkit.recipe.write import write_text

    if tool is not None and tool not in TOOLS:
        raise RecipeError(f"no tool {tool!r}", where="--tool", fix=f"one of {', '.join(TOOLS)}")
    found = translate(origin, tool, lossy=lossy)
    target = output or Path(f"{origin.stem}-trainkit.yaml")
    write_text(found.text, target)
    if not as_json:
        for kind in ("lost", "changed", "taken", "added", "left out"):
            of_kind = [line for line in found.lines if line.kind == kind]
            if of_kind:
                echo(f"{kind} ({len(of_kind)})")
            for line in of_kind:
                arrow = f" -> {line.ours}" if line.ours else ""
                note = f"  ({line.note})" if line.note else ""
                echo(f"  {line.theirs}{arrow}{note}")
    lines = [asdict(line) for line in found.lines]
    _say(target, {"recipe": str(target), "tool": found.tool, "lines": lines}, as_json)


def _say(target: Path, row: Mapping[str, object], as_json: bool, gpus: int = 1) -> None:
    tell(row, as_json, str(target))
    command = "sft" if gpus == 1 else f"launch --nproc_per_node {gpus}"
    if not as_json:
        note(f"train with: trainkit {command} --config {shlex.quote(str(target))}")
