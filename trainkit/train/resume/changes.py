"""What is not as it was when a checkpoint was written, and whether the run may go on so.

Every checkpoint holds the values it was trained with. A value that was changed on purpose acts, or
is refused by name before the model is built; what changes the curve without being asked for (data,
order, processes, versions) needs ``--allow-changed``.
"""

import json
import shlex
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

from trainkit.errors import ResumeRefusedError
from trainkit.options.section import ACTS, CONSENT, OTHER_STATE
from trainkit.recipe import default_of, on_resume
from trainkit.train.checkpoints import BASE, ResumePoint

ANY = "all"
"""What a bare ``--allow-changed`` accepts."""

_OTHER_RANKS = "the saved shards fit the number of processes that wrote them"


def _own_schedule(change: "Change", settings: Mapping[str, Any]) -> str | None:
    """Schedules that are not a function of the step keep what they were made with."""
    kind = settings.get("training.lr_scheduler_type")
    is_own = kind in ("reduce_lr_on_plateau", "greedy")
    return f"the saved state of {kind} decides the rate, not the step" if is_own else None


def _other_groups(change: "Change", settings: Mapping[str, Any]) -> str | None:
    """With a ratio the B matrices are parameter groups of their own; how large it is may change."""
    if change.before and change.now:
        return None
    return "with and without it the saved optimizer has other groups; only its size can change"


_SAME_STATE = ("adamw_torch", "adamw_torch_fused", "flat_adamw")
"""Optimizers that go on with one another's state."""


def _other_optimizer(change: "Change", settings: Mapping[str, Any]) -> str | None:
    return None if {change.before, change.now} <= set(_SAME_STATE) else OTHER_STATE


Reason = Callable[["Change", Mapping[str, Any]], str | None]

SOMETIMES: Mapping[str, Reason] = {
    "lora.lora_plus_ratio": _other_groups,
    "training.optim": _other_optimizer,
    "training.lr_scheduler_kwargs": _own_schedule,
}
"""Keys that a continued run refuses to change at times; of others the definition says it always."""

PARTS = "data_parts"
"""What the fingerprint of the data is made of: named where it differs, not compared itself."""

IN_USE = "in_use"
"""Where a checkpoint keeps which kernels and which attention ran."""

TEACHER = "teacher"
"""Where a checkpoint keeps the digests of a teacher's files, as under `BASE` of the base's."""

EVALUATION = "data.evaluation"
"""Where it keeps those of the files that judge the model."""

DEEPSPEED = "deepspeed"
"""Where it keeps the digest of DeepSpeed's own settings, which the recipe names by their file."""

_FILES: Mapping[str, tuple[str, ...]] = {
    BASE: (),
    TEACHER: (),
    EVALUATION: (
        *("data.eval", "generation_eval.data", "generation_eval.metrics"),
        *("eval_tasks", "eval_tasks.tasks", "eval_tasks.data"),
    ),
    DEEPSPEED: ("parallel.shard",),
}
"""What is kept as digests of files, with the keys that ask for other ones."""

_AROUND = (
    *("versions", "gpu", "device", "code", "num_ranks", "rows_per_step", "data", IN_USE),
    *(BASE, TEACHER, DEEPSPEED),
)
"""What surrounds a run, whether or not this one's checkpoint has it."""


_ABSENT_IS_DEFAULT = ("preference", "distill")
"""Sections of an objective, which acts as their defaults say where they are not written."""


@dataclass(frozen=True)
class Change:
    """A value that is not what it was."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.before)} -> {_short(self.now)}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Review:
    """What differs from the checkpoint, all of it allowed.

    Attributes:
        accepted: let pass by ``--allow-changed``.
    """

    changes: tuple[Change, ...] = ()
    accepted: tuple[Change, ...] = ()

    def value_before(self, key: str) -> Any:
        """What a changed key was; None where it is what it was."""
        return next((change.before for change in self.changes if change.key == key), None)

    def factor(self, key: str) -> float:
        """By what a changed number was multiplied; 1 where it is what it was."""
        return next((c.now / c.before for c in self.changes if c.key == key and c.before), 1.0)


def review(
    point: ResumePoint,
    settings: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    allowed: Sequence[str] = (),
    accepted_before: Iterable[Mapping[str, Any]] = (),
    *,
    sharded: bool = False,
) -> Review:
    """Hold a start against the checkpoint it continues from.

    Args:
        point: the checkpoint.
        settings: every value of this start (:func:`settings_of`).
        fingerprint: what surrounds it: data, processes, versions.
        allowed: keys given with ``--allow-changed``.
        accepted_before: ``{key, now}`` of what earlier starts let pass; asked for once is enough.
        sharded: each process has saved a part of the optimizer's state.
    """
    if point.settings.get("training.save_only_model"):
        raise ResumeRefusedError(
            "the checkpoint holds the model only (training.save_only_model): without the "
            "optimizer's state the rest of the run would be another",
            where=str(point.checkpoint),
            fix=_from_the_weights(point),
        )
    known = [*settings, *point.settings, *fingerprint, *point.fingerprint]
    _refuse_unknown(allowed, known)
    changes = list(_differences(point.settings, settings)) if point.settings else []
    before = {k: v for k, v in point.fingerprint.items() if k not in (PARTS, IN_USE, *_FILES)}
    around = [
        *_differences(before, fingerprint, only_known=True),
        *_other_files(point.fingerprint, fingerprint, {change.key for change in changes}),
    ]
    refused = {change.key: _reason(change, settings) for change in changes}
    if sharded:
        refused |= {change.key: _OTHER_RANKS for change in around if change.key == "num_ranks"}
    needing = [*around, *(change for change in changes if on_resume(change.key) == CONSENT)]
    unrefused = [change for change in needing if not refused.get(change.key)]
    needed = _without_consent(unrefused, allowed, accepted_before)
    if needed or any(refused.values()):
        parts = [each.get(PARTS) or {} for each in (point.fingerprint, fingerprint)]
        everything = [*around, *changes]
        raise _refusal(
            point,
            [change for change in everything if refused.get(change.key)],
            needed,
            [
                _row(change, refused.get(change.key), needed, needing, parts)
                for change in everything
            ],
        )
    return Review(tuple(c for c in changes if c not in needing), tuple(needing))


def review_running(
    point: ResumePoint,
    runs: Mapping[str, Any],
    allowed: Sequence[str] = (),
    accepted_before: Iterable[Mapping[str, Any]] = (),
) -> tuple[Change, ...]:
    """As `review`, of what only the built model knows; returns what was accepted."""
    known = point.fingerprint.get(IN_USE)
    if not isinstance(known, dict):
        return ()
    changes = list(_differences({IN_USE: known}, {IN_USE: runs}, only_known=True))
    needed = _without_consent(changes, allowed, accepted_before)
    if needed:
        rows = [_row(change, None, needed, changes, ({}, {})) for change in changes]
        raise _refusal(point, [], needed, rows)
    return tuple(changes)


def _without_consent(
    changes: Sequence[Change], allowed: Sequence[str], accepted_before: Iterable[Mapping[str, Any]]
) -> list[Change]:
    known = [(row["key"], row["now"]) for row in accepted_before]
    return [
        change
        for change in changes
        if not _is_allowed(change.key, allowed) and (change.key, change.now) not in known
    ]


def _row(
    change: Change,
    reason: str | None,
    needed: Sequence[Change],
    needing: Sequence[Change],
    parts: Sequence[Mapping[str, Any]],
) -> tuple[str, str]:
    """A line of the table of what differs: the change, and what it means for a continued run."""
    what = str(change)
    if change.key == "data":
        what += _data_differences(parts[0], parts[1])
    if reason is not None:
        return what, f"cannot change: {reason}"
    if change in needed:
        return what, f"needs --allow-changed {_consent_key(change.key)}"
    return what, "accepted" if change in needing else "acts from here on"


def _refusal(
    point: ResumePoint,
    refused: Sequence[Change],
    needed: Sequence[Change],
    rows: Sequence[tuple[str, str]],
) -> ResumeRefusedError:
    """All that differs, so that nobody learns of it one by one."""
    width = min(max(len(what) for what, _ in rows), 60)
    table = "\n".join(f"    {what:<{width}}  {meaning}" for what, meaning in rows)
    keys = list(dict.fromkeys(_consent_key(change.key) for change in needed))
    consent = " ".join(f"--allow-changed {key}" for key in keys)
    if refused:
        fix = f"leave what cannot change as it was, or {_from_the_weights(point)}"
        if consent:
            fix += f". The rest is accepted with {consent}"
    else:
        fix = (
            f"bring back what it was, start a new run without --resume, or accept it with {consent}"
        )
    return ResumeRefusedError(
        f"the rest of the run would not be what it was begun as:\n{table}",
        where=str(point.checkpoint),
        fix=fix,
    )


def _data_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if not before or not now:
        return ""
    before, plain = (json.loads(json.dumps(parts)) for parts in (before, now))
    then, today = before["files"], plain["files"]
    differences = []
    for row in then:
        if row[:3] in [other[:3] for other in today]:
            continue
        same_name = next((other for other in today if other[3] == row[3]), None)
        if same_name is None:
            differences.append(f"{row[3]} is missing")
        elif row[2] is None:  # of a stream: nothing is counted
            differences.append(f"{row[3]} was changed")
        elif same_name[0] == row[0]:
            differences.append(f"{row[3]} gives {same_name[1]} samples and gave {row[1]}")
        else:
            differences.append(f"{row[3]} was changed ({row[1]} samples, now {same_name[1]})")
    names = [row[3] for row in then]
    digests = [row[:3] for row in then]
    differences += [
        f"{row[3]} is new" for row in today if row[3] not in names and row[:3] not in digests
    ]
    differences += [
        f"{key}: {_short(before[key])} -> {_short(plain.get(key))}"
        for key in before
        if key != "files" and before[key] != plain.get(key)
    ]
    if not differences:
        differences = ["the same files in another order"]
    return f" ({'; '.join(differences)})"


def _consent_key(key: str) -> str:
    """What to give ``--allow-changed`` for a key: versions and data go as a whole."""
    section = key.partition(".")[0]
    return section if section in ("versions", "data", IN_USE, BASE, TEACHER) else key


def _from_the_weights(point: ResumePoint) -> str:
    merge = shlex.join(["trainkit", "merge", str(point.checkpoint), "DIR"])
    return (
        f"begin a new run from the weights reached: {merge}, and "
        "then sft with model.name_or_path: DIR (merge also makes one plain model of ZeRO's shards)"
    )


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], *, only_known: bool = False
) -> Iterable[Change]:
    """Each key that differs.

    A section that is absent counts as null, or as its defaults where it then has these. A key that
    its section did not have yet, in the version that wrote the checkpoint, counts as today's
    default: what that version did.
    """
    keys = before if only_known else dict.fromkeys([*before, *now])
    for key in keys:
        if key in now or not only_known:
            then, today = (
                side.get(key) if only_known or key in side else _unwritten(key, side)
                for side in (before, now)
            )
            if isinstance(then, dict) and isinstance(today, dict) and only_known:
                for inner in _differences(then, today, only_known=True):
                    yield Change(f"{key}.{inner.key}", inner.before, inner.now)
            elif then != today:
                yield Change(key, then, today)


def _other_files(
    before: Mapping[str, Any], now: Mapping[str, Any], changed_keys: Container[str]
) -> Iterable[Change]:
    """Each file that is not what it was: changed, and not moved.

    Nothing where one side does not know, or other files are asked for.
    """
    for kind, keys in _FILES.items():
        then, today = before.get(kind), now.get(kind)
        if not isinstance(then, dict) or not isinstance(today, dict):
            continue
        if any(key in changed_keys for key in keys) or sorted(then.values()) == sorted(
            today.values()
        ):
            continue
        for name in sorted({*then, *today}):
            if then.get(name) != today.get(name):
                yield Change(f"{kind}.{name}", then.get(name), today.get(name))


def _unwritten(key: str, settings: Mapping[str, Any]) -> Any:
    """What a key that settings do not have stands for: its default, or nothing."""
    section = key.rpartition(".")[0]
    was_written = any(each.startswith(f"{section}." if section else "") for each in settings)
    return default_of(key) if was_written or section in _ABSENT_IS_DEFAULT else None


def _reason(change: Change, settings: Mapping[str, Any]) -> str | None:
    for key, reason in SOMETIMES.items():
        if f"{change.key}.".startswith(f"{key}."):
            return reason(change, settings)
    rule = on_resume(change.key)
    return None if rule in (ACTS, CONSENT) else rule


def _is_allowed(key: str, allowed: Sequence[str]) -> bool:
    return any(
        word == ANY or key == word or key.startswith(f"{word}.") or key.endswith(f".{word}")
        for word in allowed
    )


def _refuse_unknown(allowed: Sequence[str], known: Sequence[str]) -> None:
    for word in allowed:
        is_around = word.partition(".")[0] in _AROUND
        if word != ANY and not is_around and not any(_is_allowed(key, [word]) for key in known):
            like = get_close_matches(word, known, 1, 0.5)
            raise ResumeRefusedError(
                "nothing of that name is compared with the checkpoint",
                where=f"--allow-changed {word}",
                fix=f"did you mean {like[0]}?" if like else "a refusal to go on names its keys",
            )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
