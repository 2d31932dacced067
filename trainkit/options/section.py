"""What all sections are: frozen, strict, and refused with a sentence that says the rule."""

import types
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from trainkit.errors import RecipeError
from trainkit.options.words import advice_of, did_you_mean, rule_of

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
    from typing_extensions import Self  # typing's own from Python 3.11 on
else:
    ModelMetaclass = type(BaseModel)  # it has no public name


def broken_rule(key: str, what: str, fix: str | None) -> PydanticCustomError:
    """A rule about more than one key, reported at the line of ``key``."""
    return PydanticCustomError("rule", "{what}", {"key": key, "what": what, "fix": fix})


class _Explained(ModelMetaclass):
    """Says what is wrong with a section that Python code makes as a recipe's loader would.

    The loader validates mappings and never comes here: it knows the lines, and says all at once.
    """

    def __call__(cls: type["Section"], *first: Any, **values: Any) -> Any:  # type: ignore[misc]
        """Make a section; the value of its first key may be given by position."""
        values |= dict(zip([*cls.model_fields][:1], first, strict=True)) if first else {}
        try:
            return ModelMetaclass.__call__(cls, **values)
        except ValidationError as error:
            raise _refused(cls, error.errors(include_url=False)[0]) from error


UNION_TAGS = frozenset({"bool", "word", "section", "sources", "part"})
"""Names for the forms of a value, which pydantic adds to where an error is."""


class Section(BaseModel, metaclass=_Explained):
    """A part of a recipe: unknown keys and wrong types are errors, values never change.

    Attributes:
        at: the dotted key of the section, for errors; ``[]`` for the item of a list.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    at: ClassVar[str] = ""

    def replace(self, **values: Any) -> "Self":
        """The same with other values, held against the rules again.

        Raises:
            RecipeError: a value breaks a rule.
        """
        kept = {key: getattr(self, key) for key in self.model_fields_set}
        return type(self)(**{**kept, **values})


def section_in(annotation: Any, *, in_list: bool = False) -> tuple[type[BaseModel], bool] | None:
    """The section class inside an annotation, and whether it is the item of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, in_list
    origin = get_origin(annotation)
    if origin in (Annotated, list, Union, types.UnionType):
        for part in get_args(annotation):
            found = section_in(part, in_list=in_list or origin is list)
            if found is not None:
                return found
    return None


def _refused(section: type[Section], error: ErrorDetails) -> RecipeError:
    parts = [part for part in error["loc"] if not isinstance(part, int)]
    key = ".".join(part for part in parts if part not in UNION_TAGS)
    where = ".".join(part for part in (section.at, key) if part)
    if error["type"] == "rule":
        context = error["ctx"]
        return RecipeError(context["what"], where=context["key"], fix=context["fix"])
    if error["type"] == "extra_forbidden":
        fix = did_you_mean(key, list(section.model_fields))
        return RecipeError(f"{section.__name__} has no {key}", where=where, fix=fix)
    if error["type"] == "missing":
        return RecipeError(f"{section.__name__} needs {key}", where=where)
    return RecipeError(f"{error['input']!r} {rule_of(error)}", where=where, fix=advice_of(error))
