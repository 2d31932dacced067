"""Samples made visible: which tokens are trained, who wrote them, which rows are dropped."""

import base64
import hashlib
import io
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from transformers import PreTrainedTokenizerBase

from trainkit.data.builder import SampleBuilder
from trainkit.data.datasets import PreparedData, efficiency
from trainkit.data.files import RawRow, decode, read_rows
from trainkit.data.formats import parse_row
from trainkit.data.images import DECODE_ERRORS, Image
from trainkit.data.images import decode as decode_image
from trainkit.data.messages import Comparison, Conversation, RowError, TextRow
from trainkit.data.options import DataOptions
from trainkit.data.store import LEDGER, read_ledger
from trainkit.data.summary import Finding, Status, verdict
from trainkit.data.vision import NoVision, Vision
from trainkit.errors import DataError
from trainkit.options import Source
from trainkit.options.data import IGNORE_INDEX
from trainkit.terminal import visible

PER_REASON = 3
"""So many rows are shown for each reason."""

EXCERPT = 400
"""So many characters of a row are shown."""


def dropped_rows(data: PreparedData, *, with_excerpts: bool = False) -> list[dict[str, str]]:
    """The first dropped rows of each reason, in the order of the files, as JSON shows them.

    Rows are read again for their excerpts.
    """
    seen: Counter[str] = Counter()
    found = []
    for part in data.parts:
        chosen = []
        for entry in read_ledger(part.store.directory / LEDGER):
            seen[entry.reason] += entry.action == "dropped"
            if entry.action == "dropped" and seen[entry.reason] <= PER_REASON:
                chosen.append(entry)
        texts: dict[tuple[int, int], str] = {}
        for file in {int(entry.file) for entry in chosen} if with_excerpts else ():
            lines = {entry.line for entry in chosen if int(entry.file) == file}
            for raw in read_rows(part.paths[file]):
                if raw.line in lines:
                    text: Any = "" if raw.payload is None else raw.payload
                    if isinstance(text, bytes):
                        text = text[: 4 * EXCERPT].decode("utf-8", errors="replace")
                    more = "…" if len(str(text)) > EXCERPT else ""
                    texts[file, raw.line] = str(text)[:EXCERPT] + more
                if raw.line >= max(lines):
                    break
        for entry in chosen:
            file = int(entry.file)
            place, text = f"{part.files[file]}:{entry.line}", texts.get((file, entry.line), "")
            row = {"id": place, "source": part.name, "dropped": entry.reason}
            found.append({**row, "detail": entry.detail, "row": text})
    return found


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens that are all trained, or all not.

    Attributes:
        text: decoded, control tokens included.
    """

    text: str
    trained: bool
    num_tokens: int
    missed: bool = False


@dataclass(frozen=True)
class View:
    """One sample to look at.

    Attributes:
        id: ``file:line``.
        input_ids, labels: as the model gets them; -100 is not trained.
        missed: ranges of tokens that belong to an answer and are not trained.
        images: of each its file (or the one that keeps the bytes of rows), its size as it is looked
            at, its tokens, and a data URI of a small one.
    """

    id: str
    source: str
    why: str
    input_ids: list[int]
    labels: list[int]
    tokens: list[str]
    runs: tuple[Run, ...]
    missed: tuple[tuple[int, int], ...] = ()
    images: tuple[dict[str, Any], ...] = ()

    @property
    def num_trained_tokens(self) -> int:
        """Labels that are trained."""
        return sum(label != IGNORE_INDEX for label in self.labels)

    def to_dict(self) -> dict[str, Any]:
        """The keys that ``data preview --json`` prints."""
        images = [{k: v for k, v in each.items() if k != "thumbnail"} for each in self.images]
        return {
            "id": self.id,
            "source": self.source,
            "input_ids": self.input_ids,
            "labels": self.labels,
            "tokens": self.tokens,
            "num_trained_tokens": self.num_trained_tokens,
            "untrained_answer": [list(pair) for pair in self.missed],
            **({"images": images} if images else {}),
        }


TRAINED, MISSED = 1, 2


def view(
    data: PreparedData,
    tokenizer: PreTrainedTokenizerBase,
    index: int,
    why: str,
    turns: Sequence[tuple[str, int, int]] = (),
) -> View:
    sample = data[index]
    ids = [int(token) for token in sample["input_ids"]]
    kinds = sample["loss_mask"].astype(np.uint8)
    kinds[:1] = 0  # a first token is never predicted
    labels = [token if kind else IGNORE_INDEX for token, kind in zip(ids, kinds, strict=True)]
    for role, first, last in turns:
        if role in ANSWERS:
            kinds[first:last][kinds[first:last] == 0] = MISSED
    borders = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(ids)]
    ranges = [(start, end) for start, end in itertools.pairwise(borders) if end > start]
    images = sample.get("images", ())
    runs = tuple(
        Run(
            _text(tokenizer, ids[start:end], shortened=bool(images)),
            kinds[start] == TRAINED,
            end - start,
            kinds[start] == MISSED,
        )
        for start, end in ranges
    )
    missed = tuple((start, end) for start, end in ranges if kinds[start] == MISSED)
    tokens = [tokenizer.decode([token]) for token in ids]
    name = data.source_names[sample["source"]]
    shown = tuple(map(_shown, images))
    return View(data.sample_id(index), name, why, ids, labels, tokens, runs, missed, shown)


THUMBNAIL = 160
"""Pixels of its longer side."""


def _shown(image: Image) -> dict[str, Any]:
    try:
        pixels = decode_image(image.read())
    except (RowError, *DECODE_ERRORS) as error:
        what, fix = f"an image cannot be shown: {error}", "replace the file, or remove its row"
        raise DataError(what, where=image.path, fix=fix) from error
    width, height = pixels.size
    pixels.thumbnail((THUMBNAIL, THUMBNAIL))
    stream = io.BytesIO()
    pixels.save(stream, "JPEG")
    uri = f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
    size = {"height": height, "width": width, "tokens": image.num_tokens}
    return {"path": image.path, **size, "thumbnail": uri}


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, shortened: bool) -> str:
    """What tokens say; where images are among them, one token of many that follow one another."""
    if not shortened:
        return str(tokenizer.decode(ids))
    pieces: list[str] = []
    rest: list[int] = []
    for token, group in itertools.groupby(ids):
        count = len(list(group))
        if count < MANY:
            rest += [token] * count
            continue
        pieces += [tokenizer.decode(rest), f"{tokenizer.decode([token])}×{count}"]
        rest = []
    return "".join([*pieces, tokenizer.decode(rest)])


MANY = 4
"""Placeholders in a row are shown as one of them and their number."""


def choose(data: PreparedData, count: int, *, seed: int) -> list[tuple[int, str]]:
    """Which samples to show: ``count`` at random, then the worst offenders."""
    generator = np.random.default_rng(seed)
    drawn = generator.choice(len(data), size=min(count, len(data)), replace=False)
    chosen = {int(index): "random" for index in sorted(drawn)}
    shares = data.num_trained / np.maximum(data.lengths, 1)
    worst = ((int(np.argmax(data.lengths)), "longest"), (int(np.argmin(shares)), "least trained"))
    for index, why in worst:
        chosen.setdefault(index, why)
    cut = _most_cut(data)
    if cut is not None:
        chosen.setdefault(cut, "most cut")
    return list(chosen.items())


def _most_cut(data: PreparedData) -> int | None:
    """The kept sample whose row lost the most tokens."""
    best: tuple[int, int] | None = None
    for part, start in zip(data.parts, data.starts, strict=True):
        for entry in read_ledger(part.store.directory / LEDGER):
            if entry.action != "cut" or (best is not None and entry.tokens <= best[0]):
                continue
            places = (part.store.file == int(entry.file)) & (part.store.line == entry.line)
            found = np.flatnonzero(places)
            if len(found):
                best = (entry.tokens, int(start) + int(found[0]))
    return None if best is None else best[1]


ANSWERS = ("assistant", "completion")
"""Whose words are to be trained."""


class Authors:
    """Says who wrote the tokens of samples, by reading their rows again."""

    def __init__(
        self,
        data: PreparedData,
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions,
        vision: Vision | NoVision | None = None,
    ) -> None:
        self.data = data
        self.options = options
        self.builder = SampleBuilder(tokenizer, options, vision)
        self._turns: dict[int, list[tuple[str, int, int]]] = {}

    def read(self, indices: Sequence[int]) -> None:
        wanted: dict[tuple[int, int], dict[int, list[int]]] = {}
        for index in indices:
            part, place = self.data.find(index)
            store = self.data.parts[part].store
            rows = wanted.setdefault((part, int(store.file[place])), {})
            rows.setdefault(int(store.row[place]), []).append(index)
        for (part, file), rows in wanted.items():
            path = self.data.parts[part].paths[file]
            last = max(rows)
            for raw in read_rows(path):
                for index in rows.get(raw.number, ()):
                    source = self.data.parts[part].source
                    sample = self.data[index]
                    folder = path.absolute().parent
                    self._turns[index] = self._of_row(raw, source, folder, sample)
                if raw.number >= last:
                    break

    def turns(self, index: int) -> list[tuple[str, int, int]]:
        """Rows (role, first token, one past the last) of a sample that was read."""
        return self._turns[index]

    def table(self) -> list[dict[str, Any]]:
        """Rows {role, tokens, trained_tokens}; ``template`` is what no turn wrote."""
        written: Counter[str] = Counter()
        trained: Counter[str] = Counter()
        for index, turns in self._turns.items():
            mask = self.data[index]["loss_mask"].copy()
            mask[:1] = 0
            roles = np.full(len(mask), "template", dtype=object)
            for role, first, last in turns:
                roles[first:last] = role
            for role in set(roles.tolist()):
                written[role] += int(np.count_nonzero(roles == role))
                trained[role] += int(np.count_nonzero(mask[roles == role]))
        return [
            {"role": role, "tokens": count, "trained_tokens": trained[role]}
            for role, count in written.most_common()
        ]

    def _of_row(
        self, raw: RawRow, source: Source, folder: Path, sample: dict[str, Any]
    ) -> list[tuple[str, int, int]]:
        assert raw.payload is not None
        images = self.builder.vision is not None
        parsed = parse_row(decode(raw.payload), source.format, source.columns, images=images)
        size = len(sample["input_ids"])
        if isinstance(parsed, Comparison):
            source_place, place = self.data.find(sample["id"])
            part = int(self.data.parts[source_place].store.part[place])
            parsed = parsed.conversations[part - parsed.first]
        if isinstance(parsed, TextRow) and parsed.prompt:
            return self._of_completion(parsed, sample)
        if not isinstance(parsed, Conversation):
            return [("text", 0, size)]
        drafter = self.builder.drafter_of(parsed)
        conversation, *_ = self.builder.read(parsed, source, folder)
        found = self.options.mask != "none"  # the switch that every turn's place is looked for with
        turns = tuple(replace(message, train=found) for message in conversation.messages)
        conversation = replace(conversation, messages=turns)
        for count in range(len(conversation.messages), 0, -1):
            # A cut or split sample is one of the shorter conversations.
            try:
                draft = drafter.draft(0, 0, conversation.first(count))
            except RowError:
                continue
            (tokens,) = drafter.encode([draft])
            common = min(len(tokens.input_ids), size)
            if np.array_equal(tokens.input_ids[:common], sample["input_ids"][:common]):
                return [
                    (draft.conversation.messages[span.turn].role, first, last)
                    for span, (first, last) in zip(draft.masked.spans, tokens.ranges, strict=True)
                ]
        return [("text", 0, size)]

    def _of_completion(self, row: TextRow, sample: dict[str, Any]) -> list[tuple[str, int, int]]:
        spans = [(len(row.prompt), len(row.prompt) + len(row.text))]
        whole = [row.prompt + row.text]
        (tokens,) = self.builder.encoder.encode(whole, [spans], add_special_tokens=True)
        size, first = len(sample["input_ids"]), tokens.ranges[0][0]
        ids = tokens.input_ids
        if len(ids) > 1 and ids[0] == ids[1] != sample["input_ids"][1]:
            first -= 1  # the bos that was there twice
        return [("prompt", 0, first), ("completion", first, size)]


def page(
    views: Sequence[View],
    roles: Sequence[dict[str, Any]],
    control: Sequence[str],
    title: str,
    dropped: Sequence[Mapping[str, str]] = (),
) -> str:
    """The page, of ``preview.html``."""

    def marked(text: str) -> Markup:
        text = str(Markup.escape(visible(text)))
        for token in map(str, map(Markup.escape, control)):
            text = text.replace(token, f'<span class="control">{token}</span>')
        text = re.sub(r" +(?=\n|$)", lambda blanks: "·" * len(blanks[0]), text)
        return Markup(text.replace("\n", '<span class="space">↵</span>\n'))

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"visible": visible, "marked": marked}
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text("utf-8"))
    return template.render(views=views, roles=roles, title=title, dropped=dropped)


# -- figures ----


MAX_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Cut:
    """What a ``max_length`` would do.

    Attributes:
        packing_efficiency: the share of packed rows that is not padding, over samples that fit.
    """

    max_length: int
    samples: int
    tokens: int
    trained_tokens: int
    packing_efficiency: float


@dataclass(frozen=True)
class DataStats:
    """Figures about prepared data.

    Attributes:
        lengths: ``p50``, ``p95``, ``p99``, ``max``, ``mean``, in tokens.
        rows: ``kept``, ``dropped``, ``cut`` and ``repaired`` ones, and those of each reason.
        duplicates: samples whose ids another sample has too, not counting the first of each.
        cuts: for every ``max_length`` to count.
        suggested_max_length: the smallest multiple of 64 that takes 99% of the samples whole.
        histogram: upper edge (tokens) and number of samples of each bar.
    """

    samples: int
    tokens: int
    trained_tokens: int
    lengths: dict[str, float]
    trained_share: float
    rows: dict[str, int]
    duplicates: int
    cuts: tuple[Cut, ...]
    suggested_max_length: int
    histogram: tuple[tuple[int, int], ...]
    images: int = 0
    image_tokens: int = 0


def measure(data: PreparedData, max_lengths: Sequence[int] = MAX_LENGTHS) -> DataStats:
    lengths = data.lengths
    # Lengths that samples have: between two of them an interpolated one takes fewer samples whole.
    shares = np.percentile(lengths, (50, 95, 99), method="inverted_cdf")
    sizes = dict(zip(("p50", "p95", "p99"), map(float, shares), strict=True))
    sizes |= {"max": float(lengths.max()), "mean": round(float(lengths.mean()), 1)}
    tried = [limit for limit in max_lengths if limit < 2 * sizes["max"]] or [max_lengths[0]]
    tokens, totals = int(lengths.sum()), data.summary["totals"]
    rows = Counter({key: totals[key] for key in ("kept", "dropped", "cut", "repaired")})
    for file in data.summary["files"]:
        rows.update(file["reasons"])
    different = {
        hashlib.blake2b(
            sample["input_ids"].tobytes()
            + b"".join(image.digest.to_bytes(8, "little") for image in sample.get("images", ())),
            digest_size=12,
        ).digest()
        for sample in map(data.__getitem__, range(len(data)))
    }
    return DataStats(
        samples=len(data),
        tokens=tokens,
        trained_tokens=int(data.num_trained.sum()),
        lengths=sizes,
        trained_share=int(data.num_trained.sum()) / tokens,
        rows=dict(rows),
        duplicates=len(data) - len(different),
        cuts=tuple(_cut_at(data, limit) for limit in tried),
        suggested_max_length=-(-int(np.ceil(sizes["p99"])) // 64) * 64,
        histogram=_histogram(lengths),
        images=data.num_images,
        image_tokens=data.num_image_tokens,
    )


def as_rows(stats: DataStats) -> list[dict[str, Any]]:
    """The figures as flat rows {metric, value, unit}, and the cuts with their ``max_length``."""
    figures: list[tuple[str, float, str, dict[str, int]]] = [
        ("samples", stats.samples, "samples", {}),
        ("tokens", stats.tokens, "tokens", {}),
        ("trained_tokens", stats.trained_tokens, "tokens", {}),
        ("trained_share", round(stats.trained_share, 4), "share", {}),
        ("duplicates", stats.duplicates, "samples", {}),
        ("suggested_max_length", stats.suggested_max_length, "tokens", {}),
        *((f"length_{name}", value, "tokens", {}) for name, value in stats.lengths.items()),
        *((f"rows_{name}", count, "rows", {}) for name, count in stats.rows.items()),
    ]
    if stats.images:
        figures.append(("images", stats.images, "images", {}))
        figures.append(("image_tokens", stats.image_tokens, "tokens", {}))
    for cut in stats.cuts:
        at = {"max_length": cut.max_length}
        figures += [
            ("cut_samples", cut.samples, "samples", at),
            ("cut_tokens", cut.tokens, "tokens", at),
            ("cut_trained_tokens", cut.trained_tokens, "tokens", at),
            ("packing_efficiency", round(cut.packing_efficiency, 4), "share", at),
        ]
    return [
        {"metric": name, "value": value, "unit": unit, **at} for name, value, unit, at in figures
    ]


def _cut_at(data: PreparedData, limit: int) -> Cut:
    long = np.flatnonzero(data.lengths > limit)
    trained = sum(int(np.count_nonzero(data[int(i)]["loss_mask"][limit:])) for i in long)
    return Cut(
        max_length=limit,
        samples=len(long),
        tokens=int((data.lengths[long] - limit).sum()),
        trained_tokens=trained,
        packing_efficiency=efficiency(data.lengths[data.lengths <= limit], limit),
    )


def _histogram(lengths: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Bars that each reach to 2 ** (1 / 2) times the length of the one before."""
    edges = sorted({round(8 * 2 ** (step / 2)) for step in range(60)})
    top = next((i for i, edge in enumerate(edges) if edge >= lengths.max()), len(edges) - 1)
    places = np.searchsorted(edges[:top], lengths, side="left")
    counts = np.bincount(places, minlength=top + 1)
    first = int(np.flatnonzero(counts)[0])
    return tuple((edges[i], int(counts[i])) for i in range(first, top + 1))


def draw_histogram(stats: DataStats, max_length: int | None, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=140, layout="constrained")
    axes = figure.add_subplot()
    places = range(len(stats.histogram))
    axes.bar(places, [count for _, count in stats.histogram], color="#4477aa", width=0.9)
    axes.set_xticks(list(places), [f"{edge:,}" for edge, _ in stats.histogram], rotation=45)
    axes.set_xlabel("tokens in a sample, up to")
    axes.set_ylabel("samples")
    axes.spines[["top", "right"]].set_visible(False)
    edges = np.array([edge for edge, _ in stats.histogram], dtype=float)
    lines = [("p50", stats.lengths["p50"], "#228833"), ("p99", stats.lengths["p99"], "#aa3377")]
    if max_length is not None:
        lines.append(("max_length", float(max_length), "#ee6677"))
    for name, value, color in lines:
        # Bars are evenly spaced in the logarithm of the length.
        place = np.interp(np.log(value), np.log(edges), np.arange(len(edges))) + 0.45
        style = "--" if name == "max_length" else ":"
        axes.axvline(place, color=color, linestyle=style, label=f"{name} {value:,.0f}")
    axes.legend(frameon=False)
    axes.set_title(
        f"{stats.samples:,} samples, {stats.tokens:,} tokens, {stats.trained_share:.0%} trained"
    )
    figure.savefig(path)


MAX_DUPLICATE_SHARE = 0.05


def judge(data: PreparedData, stats: DataStats) -> list[Finding]:
    """The verdict, and what only a look at all samples can tell.

    ``stats`` are of the same rows, without a limit on their length.
    """
    duplicates = stats.duplicates / stats.samples
    longest = f"max_length {stats.suggested_max_length} takes 99% of the samples whole"
    findings = [
        replace(finding, detail=f"{finding.detail}; {longest}")
        if finding.check == "length"
        else finding
        for finding in verdict(data.summary)
    ]
    status: Status = "warning" if duplicates > MAX_DUPLICATE_SHARE else "ok"
    detail = f"{stats.duplicates} samples ({duplicates:.1%}) are exact copies of others"
    return [*findings, Finding("duplicates", status, detail)]
