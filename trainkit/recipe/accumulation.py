"""Gradient accumulation from the global batch size, once the number of processes is known."""

from trainkit.errors import RecipeError
from trainkit.recipe.fields.training_fields import training_fields
from trainkit.recipe.schema import Recipe


def resolve_accumulation(recipe: Recipe, data_size: int) -> int:
    """Micro-batches per optimizer step.

    ``global_batch_size`` = ``per_device_train_batch_size`` x data ranks x this number, in rows (a
    packed row holds several samples).

    Args:
        recipe: the recipe.
        data_size: ranks that read rows of their own: processes, one a GPU, unless some of them
            share a model (``parallel``).

    Raises:
        RecipeError: the global batch size cannot be divided so, or a given
            ``gradient_accumulation_steps`` disagrees with it.
    """
    name = "per_device_train_batch_size"
    micro = recipe.training.get(name, training_fields().fields[name].default)
    given = recipe.training.get("gradient_accumulation_steps")
    total = recipe.global_batch_size
    if total is None:
        return 1 if given is None else int(given)
    a_pass = micro * data_size
    ranks = "processes" if recipe.parallel.model_ranks == 1 else "data ranks"
    if total % a_pass:
        smaller = total - total % a_pass
        either = " or ".join(str(each) for each in (smaller, smaller + a_pass) if each)
        raise RecipeError(
            f"global_batch_size {total} cannot be made of {data_size} {ranks} x {micro} rows: "
            f"it is not a multiple of {a_pass}",
            where="global_batch_size",
            fix=f"take {either}, or change training.{name}",
        )
    steps = total // a_pass
    if given is not None and given != steps:
        raise RecipeError(
            f"global_batch_size {total} and gradient_accumulation_steps {given} disagree: "
            f"{data_size} {ranks} x {micro} rows x {given} = {a_pass * given}",
            where="global_batch_size",
            fix=f"remove one of them, or set gradient_accumulation_steps to {steps}",
        )
    return steps
