"""Whether what a recipe names on disk exists, checked before anything slow is imported."""

import glob
import os
from importlib import metadata
from pathlib import Path

from trainkit.errors import RecipeError
from trainkit.options import Source
from trainkit.places import local_path, regular
from trainkit.recipe.load import LoadedRecipe
from trainkit.recipe.problems import InvalidRecipe, Problem

_TRACKERS = frozenset(
    [
        "clearml",
        "codecarbon",
        "comet_ml",
        "dvclive",
        "mlflow",
        "neptune",
        "swanlab",
        "tensorboard",
        "trackio",
        "wandb",
    ]
)
"""Those of transformers' names for trackers that are also the package's name."""


_SAME_AS = {"tensorboard": ("tensorboardX",), "mlflow": ("mlflow-skinny",)}
"""Packages that serve instead."""


def check_files(loaded: LoadedRecipe) -> None:
    """Refuse data and model paths that lead nowhere.

    Relative paths start at the current directory. Names that can only be a hub's are left to the
    loading.

    Raises:
        InvalidRecipe: with every missing path, absolute.
    """
    recipe = loaded.recipe
    problems = []
    lists = {"data.train": recipe.data.train, "data.eval": recipe.data.eval_sources}
    if recipe.generation_eval is not None:
        lists["generation_eval.data"] = recipe.generation_eval.data
    for key, sources in lists.items():
        for index, source in enumerate(sources):
            problem = _missing_source(source, key, loaded.where(f"{key}[{index}]"))
            if problem is not None:
                problems.append(problem)
    model = recipe.model.name_or_path
    path = local_path(model)
    if path is not None and not os.path.exists(path):  # noqa: PTH110 - as above
        problems.append(
            Problem(
                f"model.name_or_path: there is no model at {path.absolute()}",
                loaded.where("model.name_or_path"),
                "give a directory that save_pretrained wrote, a .gguf file, or a hub name",
            )
        )
    problems += [
        Problem(
            f"training.report_to: {tracker} is not installed",
            loaded.where("training.report_to"),
            f"pip install {tracker}, or take it out of report_to",
        )
        for tracker in _missing_trackers(recipe.training.get("report_to"))
    ]
    for read in (lambda: read_chat_template(recipe.data.chat_template), recipe.model.tokens):
        try:
            read()
        except RecipeError as error:
            of_key = str(error.where).startswith(("data.", "model."))  # else it names a file's line
            where = loaded.where(str(error.where)) if of_key else error.where
            problems.append(Problem(error.what, where, error.fix))
    if problems:
        raise InvalidRecipe(problems)


def read_chat_template(choice: str | None) -> str | None:
    """The template itself: ``choice`` is Jinja when it has a brace, else a file with it.

    Raises:
        RecipeError: the file cannot be read.
    """
    if choice is None or "{" in choice:
        return choice
    path = Path(choice).expanduser()
    try:
        return regular(path, RecipeError).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"data.chat_template: {path.absolute()} cannot be read: {error}",
            where="data.chat_template",
            fix="give a text file with the Jinja template, or the template itself",
        ) from error


def _missing_trackers(chosen: str | list[str] | None) -> list[str]:
    """Trackers that the run is to report to and that are not installed."""
    names = [chosen] if isinstance(chosen, str) else chosen or []
    return [name for name in names if name in _TRACKERS and not _is_installed(name)]


def _is_installed(package: str) -> bool:
    """Looked up in the installed packages: a directory ``wandb`` next to the recipe is none."""
    if any(map(_is_installed, _SAME_AS.get(package, ()))):
        return True
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _missing_source(source: Source, key: str, where: str) -> Problem | None:
    path = Path(source.path).expanduser()
    if os.path.exists(path):  # noqa: PTH110 - Path.exists raises for a name that is too long
        return None
    if glob.has_magic(source.path):
        matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207 - Path.glob is relative
        if next(matches, None) is not None:
            return None
        what = f"{key}: no file matches {path.absolute()}"
    elif local_path(source.path) is not None:
        what = f"{key}: there is no file {path.absolute()}"
    else:
        return None
    return Problem(what, where, "check the path; it starts at the directory you are in")
